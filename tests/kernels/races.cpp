// Data races of an emulated kernel, by the rules of CUDA: g++ calls a hook at every access to memory
// (-fsanitize=thread, with these hooks in place of its library), and simt.h tells when threads meet.
//
// Two accesses to a byte by different threads, one of which writes, are a race, unless both are atomic or volatile, or
// - the threads are of one block, and __syncthreads lies between;
// - they are lanes of one warp, and a __syncwarp that both take part in lies between. Votes, shuffles and reductions
//   make lanes meet, but order nothing in memory: so the CUDA C++ Programming Guide has it.
// What blocks leave for each other with a fence is not modelled: it would be reported. Values that are handed over in
// a single atomic or volatile word are fine. Whether two accesses race does not depend on the order in which lanes ran
// here.
//
// This file is compiled without hooks of its own. It knows accesses as 64 bits: block, barriers passed, thread, clock.

#include <link.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <memory>
#include <unordered_map>
#include <vector>

#define HIDDEN __attribute__((visibility("hidden")))
extern "C" HIDDEN int simt_running = -1;                       // the thread whose code runs, if any
extern "C" HIDDEN void simt_race(const char* what);            // does not return

namespace {

constexpr unsigned LANES = 32;
constexpr size_t PAGE = 4096;
enum Kind : uint64_t { PLAIN, ATOMIC };

struct Access {
  uint64_t bits;
  static Access of(uint64_t block, uint64_t epoch, uint64_t thread, uint64_t clock, Kind kind) {
    return {kind << 63 | (block & 0xffff) << 46 | (epoch & 0x3ff) << 36 | thread << 26 | (clock & 0x1ffffff) << 1 | 1};
  }
  bool exists() const { return bits & 1; }
  bool is_atomic() const { return bits >> 63; }
  unsigned block() const { return bits >> 46 & 0xffff; }
  unsigned epoch() const { return bits >> 36 & 0x3ff; }
  unsigned thread() const { return bits >> 26 & 0x3ff; }
  unsigned clock() const { return bits >> 1 & 0x1ffffff; }
};

// Of a byte: who wrote it last, and who has read it since.
struct Cell {
  Access write, read;
  uint32_t write_from, read_from;  // places in the code
  std::vector<std::pair<Access, uint32_t>>* others;
};
struct Page {
  Cell cells[PAGE] = {};
  ~Page() { forget(0, PAGE); }
  void forget(size_t from, size_t to) {
    for (size_t i = from; i < to; i++) {
      delete cells[i].others;
      cells[i] = {};
    }
  }
};

struct Range {
  uintptr_t begin = 0, end = 0;
  bool holds(uintptr_t address) const { return address >= begin && address < end; }
};

Range image, stacks, fixed, dynamic;  // of the library, of all threads, and the two parts of shared memory
std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages;
uintptr_t last_number = 0;
Page* last_page = nullptr;
unsigned block, epoch, threads;
std::vector<uint32_t> clocks;  // for each thread what it knows of the lanes of its warp

Page& page_of(uintptr_t address) {
  uintptr_t number = address / PAGE;
  if (last_page && number == last_number) return *last_page;
  auto& page = pages[number];
  if (!page) page = std::make_unique<Page>();
  last_number = number, last_page = page.get();
  return *last_page;
}

void forget(Range range) {
  for (uintptr_t at = range.begin; at < range.end;) {
    uintptr_t next = (at / PAGE + 1) * PAGE, end = next < range.end ? next : range.end;
    auto found = pages.find(at / PAGE);
    if (found != pages.end()) found->second->forget(at % PAGE, at % PAGE + (end - at));
    at = end;
  }
}

uint32_t& known(unsigned thread, unsigned lane) { return clocks[thread * LANES + lane]; }

bool is_before(Access access, unsigned thread) {
  if (access.block() != (block & 0xffff)) return false;
  if (access.thread() == thread || access.epoch() != (epoch & 0x3ff)) return true;
  return access.thread() / LANES == thread / LANES && known(thread, access.thread() % LANES) >= access.clock();
}

void report(bool writes, uintptr_t address, Access other, bool other_wrote, uint32_t from, uint32_t other_from) {
  char text[400], where[80];
  if (fixed.holds(address))
    snprintf(where, sizeof where, "byte %zu of static shared memory", size_t(address - fixed.begin));
  else if (dynamic.holds(address))
    snprintf(where, sizeof where, "byte %zu of dynamic shared memory", size_t(address - dynamic.begin));
  else
    snprintf(where, sizeof where, "global memory at %p", reinterpret_cast<void*>(address));
  snprintf(text, sizeof text,
           "race: %s %s, which block %u, thread %u %s, with nothing between that orders them [0x%x, 0x%x]",
           writes ? "writes" : "reads", where, other.block(), other.thread(), other_wrote ? "has written" : "has read",
           from, other_from);
  simt_race(text);
}

void touch(uintptr_t address, bool writes, Kind kind, uint32_t from) {
  const unsigned thread = simt_running;
  Cell& cell = page_of(address).cells[address % PAGE];
  const Access mine = Access::of(block, epoch, thread, known(thread, thread % LANES), kind);
  auto races = [&](Access other) {
    return other.exists() && !is_before(other, thread) && !(other.is_atomic() && kind == ATOMIC);
  };
  if (races(cell.write)) report(writes, address, cell.write, true, from, cell.write_from);
  if (!writes) {
    // A read that an earlier one is known to lie before takes its place: what comes after it comes after both.
    if (!cell.read.exists() || (is_before(cell.read, thread) && cell.read.is_atomic() == mine.is_atomic())) {
      cell.read = mine, cell.read_from = from;
      return;
    }
    if (!cell.others) cell.others = new std::vector<std::pair<Access, uint32_t>>;
    for (auto& other : *cell.others) {
      const Access known = other.first;
      if (known.thread() != thread || known.block() != mine.block() || known.is_atomic() != mine.is_atomic()) continue;
      other = {mine, from};
      return;
    }
    cell.others->push_back({mine, from});
    return;
  }
  if (races(cell.read)) report(writes, address, cell.read, false, from, cell.read_from);
  if (cell.others)
    for (auto& other : *cell.others)
      if (races(other.first)) report(writes, address, other.first, false, from, other.second);
  delete cell.others;
  cell.write = mine, cell.write_from = from, cell.read = {}, cell.others = nullptr;
}

void access(const void* pointer, size_t nbytes, bool writes, Kind kind, const void* from) {
  if (simt_running < 0) return;
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  if (stacks.holds(address)) return;
  const bool is_shared = fixed.holds(address) || dynamic.holds(address);
  if (image.holds(address) && !is_shared) return;  // the emulator's own, and constants
  const uint32_t place = reinterpret_cast<uintptr_t>(from) - image.begin - 1;  // within the call
  for (size_t i = 0; i < nbytes; i++) touch(address + i, writes, kind, place);
}

int find_image(dl_phdr_info* info, size_t, void* found) {
  Range range{UINTPTR_MAX, 0};
  for (int i = 0; i < info->dlpi_phnum; i++) {
    const auto& part = info->dlpi_phdr[i];
    if (part.p_type != PT_LOAD) continue;
    uintptr_t begin = info->dlpi_addr + part.p_vaddr;
    if (begin < range.begin) range.begin = begin;
    if (begin + part.p_memsz > range.end) range.end = begin + part.p_memsz;
  }
  if (!range.holds(reinterpret_cast<uintptr_t>(&block))) return 0;
  range.begin = info->dlpi_addr;
  *static_cast<Range*>(found) = range;
  return 1;
}

}  // namespace

extern "C" {

HIDDEN void simt_races_begin(unsigned count, const void* begin_of_stacks, size_t nbytes, const void* begin_of_fixed,
                             size_t fixed_nbytes, const void* begin_of_dynamic, size_t dynamic_nbytes) {
  auto range = [](const void* begin, size_t length) {
    return Range{reinterpret_cast<uintptr_t>(begin), reinterpret_cast<uintptr_t>(begin) + length};
  };
  dl_iterate_phdr(find_image, &image);
  stacks = range(begin_of_stacks, nbytes);
  fixed = range(begin_of_fixed, fixed_nbytes);
  dynamic = range(begin_of_dynamic, dynamic_nbytes);
  pages.clear();
  last_page = nullptr;
  threads = count;
}

HIDDEN void simt_races_end() {
  pages.clear();
  last_page = nullptr;
}

// A block begins: shared memory is a new one, and nobody has met anybody.
HIDDEN void simt_races_block(unsigned number) {
  block = number, epoch = 0;
  forget(fixed), forget(dynamic);
  clocks.assign(threads * LANES, 0);
  for (unsigned i = 0; i < threads; i++) known(i, i % LANES) = 1;
}

HIDDEN void simt_races_barrier() { epoch++; }

// The lanes of a mask have met: each knows now what any of them knew, and what it does from here on is news.
HIDDEN void simt_races_warp(unsigned first, unsigned mask) {
  uint32_t joined[LANES] = {};
  for (unsigned rest = mask; rest; rest &= rest - 1)
    for (unsigned lane = 0; lane < LANES; lane++) {
      uint32_t clock = known(first + __builtin_ctz(rest), lane);
      if (clock > joined[lane]) joined[lane] = clock;
    }
  for (unsigned rest = mask; rest; rest &= rest - 1) {
    unsigned lane = __builtin_ctz(rest);
    memcpy(&known(first + lane, 0), joined, sizeof joined);
    known(first + lane, lane)++;
  }
}

HIDDEN void simt_races_atomic(const void* address, size_t nbytes, const void* from) {
  access(address, nbytes, true, ATOMIC, from);
}

// What g++ calls.

HIDDEN void __tsan_init() {}
HIDDEN void __tsan_func_entry(void*) {}
HIDDEN void __tsan_func_exit() {}
HIDDEN void __tsan_read_range(void* p, size_t n) { access(p, n, false, PLAIN, __builtin_return_address(0)); }
HIDDEN void __tsan_write_range(void* p, size_t n) { access(p, n, true, PLAIN, __builtin_return_address(0)); }

#define HOOKS(N)                                                                                                     \
  HIDDEN void __tsan_read##N(void* p) { access(p, N, false, PLAIN, __builtin_return_address(0)); }                   \
  HIDDEN void __tsan_write##N(void* p) { access(p, N, true, PLAIN, __builtin_return_address(0)); }                   \
  HIDDEN void __tsan_unaligned_read##N(void* p) { access(p, N, false, PLAIN, __builtin_return_address(0)); }         \
  HIDDEN void __tsan_unaligned_write##N(void* p) { access(p, N, true, PLAIN, __builtin_return_address(0)); }         \
  HIDDEN void __tsan_volatile_read##N(void* p) { access(p, N, false, ATOMIC, __builtin_return_address(0)); }         \
  HIDDEN void __tsan_volatile_write##N(void* p) { access(p, N, true, ATOMIC, __builtin_return_address(0)); }         \
  HIDDEN void __tsan_unaligned_volatile_read##N(void* p) { access(p, N, false, ATOMIC, __builtin_return_address(0)); } \
  HIDDEN void __tsan_unaligned_volatile_write##N(void* p) { access(p, N, true, ATOMIC, __builtin_return_address(0)); }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)

}  // extern "C"
