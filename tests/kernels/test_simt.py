"""The emulator does what CUDA documents, and names what would go wrong on a device."""

from __future__ import annotations

import ctypes
import struct
import threading

import pytest
import torch
from simt import Emulated, EmulatedFunction, requires_compiler

from lowtide.errors import LowtideError
from lowtide.kernels._nvrtc import Program

pytestmark = requires_compiler


@pytest.fixture
def names_races() -> bool:
    """A race would be named before the mistake that a test is about."""
    return False


# Each lane writes what it got; ``input`` holds what the lanes give.
WARP = Program(
    "warp",
    """
struct Arguments { const unsigned* input; unsigned* output; unsigned operation, operand, width; };

__device__ __forceinline__ unsigned apply(const Arguments& a, unsigned x) {
    const unsigned all = 0xffffffffu;
    switch (a.operation) {
        case 0: return __ballot_sync(all, x & a.operand);
        case 1: return __any_sync(all, x == a.operand);
        case 2: return __all_sync(all, x >= a.operand);
        case 3: return __shfl_sync(all, x, a.operand, a.width);
        case 4: return __shfl_up_sync(all, x, a.operand, a.width);
        case 5: return __shfl_down_sync(all, x, a.operand, a.width);
        case 6: return __shfl_xor_sync(all, x, a.operand, a.width);
        case 7: return __reduce_max_sync(all, x);
        case 8: return __reduce_or_sync(all, x);
        default: return __reduce_add_sync(all, x);
    }
}

__global__ void __launch_bounds__(64) warp(const __grid_constant__ Arguments a) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    a.output[i] = apply(a, a.input[i]);
}
""",
)
OPERATIONS = ["BALLOT", "ANY", "ALL", "SHFL", "UP", "DOWN", "XOR", "MAX", "OR", "ADD"]

# One value a thread, summed with all before it in the whole grid by a decoupled look-back: a block takes a ticket,
# publishes its sum, and adds up what the blocks with smaller tickets have published.
SCAN = Program(
    "scan",
    """
struct Arguments {
    const unsigned* input;
    unsigned* output;
    unsigned* ticket;
    unsigned long long* published;  // sum, and above it 1: of the block alone, 2: of all up to the block
    unsigned count;
};

template <int THREADS>
__global__ void scan(Arguments a) {
    extern __shared__ __align__(16) unsigned warp_sums[];
    __shared__ unsigned tile, before;
    if (threadIdx.x == 0) tile = atomicAdd(a.ticket, 1);
    __syncthreads();
    unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, i = tile * THREADS + threadIdx.x;
    unsigned sum = i < a.count ? a.input[i] : 0;
    for (unsigned by = 1; by < 32; by *= 2) {
        unsigned other = __shfl_up_sync(~0u, sum, by);
        if (lane >= by) sum += other;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    for (unsigned w = 0; w < warp; w++) sum += warp_sums[w];
    if (threadIdx.x == THREADS - 1) {
        volatile unsigned long long* published = a.published;
        __threadfence();
        published[tile] = 1ull << 32 | sum;
        unsigned total = 0;
        for (int t = int(tile) - 1; t >= 0; t--) {
            unsigned long long seen = 0;
            while (!(seen >> 32)) seen = published[t];
            total += unsigned(seen);
            if (seen >> 32 == 2) break;
        }
        __threadfence();
        published[tile] = 2ull << 32 | (total + sum);
        before = total;
    }
    __syncthreads();
    if (i < a.count) a.output[i] = sum + before;
}
""",
)


def words(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def run_warp(operation: str, operand: int = 0, width: int = 32, count: int = 64) -> list[int]:
    """Two blocks of ``count`` lanes, where lane i gives i + 100; what the second block wrote, which runs backwards."""
    given = torch.arange(2 * count, dtype=torch.int32) % count + 100
    got = torch.full_like(given, -1)
    arguments = struct.pack("PPIII4x", given.data_ptr(), got.data_ptr(), OPERATIONS.index(operation), operand, width)
    Emulated(WARP).function("warp").launch(2, count, 0, arguments)
    assert torch.equal(got[:count], got[count:]), "the order in which lanes run shows"
    return got[count:].tolist()


def one_off(body: str, declarations: str = "") -> EmulatedFunction:
    source = f"struct Arguments {{ unsigned* data; unsigned n; }};\n{declarations}"
    return Emulated(Program("once", f"{source}__global__ void kernel(Arguments a) {{ {body} }}")).function("kernel")


def launch(
    body: str, data: torch.Tensor, n: int = 0, grid: int = 1, block: int = 32, shared: int = 0, declarations: str = ""
) -> None:
    arguments = ctypes.create_string_buffer(struct.pack("PI4x", data.data_ptr(), n))
    one_off(body, declarations).launch(grid, block, shared, arguments)


def test_votes() -> None:
    bits = sum(1 << lane for lane in range(32) if lane + 100 & 4)
    second = sum(1 << lane for lane in range(32) if lane + 132 & 4)
    assert run_warp("BALLOT", 4) == [bits - (1 << 32 if bits >> 31 else 0)] * 32 + [second] * 32
    assert run_warp("ANY", 131) == [1] * 32 + [0] * 32
    assert run_warp("ALL", 101) == [0] * 32 + [1] * 32


def test_reductions() -> None:
    assert run_warp("MAX") == [131] * 32 + [163] * 32
    assert run_warp("OR") == [255] * 32 + [191] * 32
    assert run_warp("ADD") == [sum(range(100, 132))] * 32 + [sum(range(132, 164))] * 32


@pytest.mark.parametrize("width", [32, 16, 4])
@pytest.mark.parametrize("operand", [0, 1, 3, 17, 31])
def test_shuffles(width: int, operand: int) -> None:
    """As the CUDA C++ Programming Guide says: out of the segment, a lane keeps its own value."""

    def expected(source: object) -> list[int]:
        lanes = [source(lane, lane // width * width) for lane in range(32)]
        return [100 + lane for lane in lanes] + [132 + lane for lane in lanes]

    assert run_warp("SHFL", operand, width) == expected(lambda lane, first: first + operand % width)
    assert run_warp("UP", operand, width) == expected(
        lambda lane, first: lane - operand if lane - operand >= first else lane
    )
    assert run_warp("DOWN", operand, width) == expected(
        lambda lane, first: lane + operand if lane + operand < first + width else lane
    )
    # Earlier segments may be read, later ones may not.
    assert run_warp("XOR", operand, width) == expected(
        lambda lane, first: lane ^ operand if (lane ^ operand) < first + width else lane
    )


def test_a_warp_may_have_fewer_lanes() -> None:
    assert run_warp("ADD", count=40)[32:] == [sum(range(132, 140))] * 8
    # What a lane that does not exist would give is not defined: 0xff bytes.
    assert run_warp("DOWN", 8, count=40)[32:] == [-1] * 8


def test_shuffles_move_wide_types() -> None:
    data = torch.zeros(64, dtype=torch.int32)
    launch(
        "unsigned long long x = 0x100000000ull * threadIdx.x + 7; float y = threadIdx.x + 0.5f;"
        "x = __shfl_xor_sync(~0u, x, 31); y = __shfl_sync(~0u, y, threadIdx.x + 1);"
        "a.data[threadIdx.x] = x >> 32; a.data[32 + threadIdx.x] = __float_as_uint(y);",
        data,
    )
    assert data[:32].tolist() == list(range(31, -1, -1))
    assert data[32:].view(torch.float32).tolist() == [*(lane + 0.5 for lane in range(1, 32)), 0.5]


def test_halves_of_a_warp_meet_apart() -> None:
    data = torch.zeros(32, dtype=torch.int32)
    launch(
        "unsigned low = threadIdx.x < 16, mask = low ? 0xffffu : 0xffff0000u, sum = 1;"
        "for (unsigned i = 0; i < (low ? 3u : 5u); i++) sum = __reduce_add_sync(mask, sum);"
        "__syncwarp(); a.data[threadIdx.x] = sum;",
        data,
    )
    assert data.tolist() == [16**3] * 16 + [16**5] * 16


def test_overlapping_masks_are_told_apart() -> None:
    """Lane 1 meets lane 2 first and lane 0 afterwards, who has been waiting for it."""
    data = torch.zeros(3, dtype=torch.int32)
    launch(
        "unsigned i = threadIdx.x, x = 0; if (i > 0) x = __reduce_add_sync(6u, i);"
        "if (i < 2) x += __reduce_add_sync(3u, 10 * (i + 1)); a.data[i] = x;",
        data,
        block=3,
    )
    assert data.tolist() == [30, 33, 3]


@pytest.mark.parametrize(("count", "threads"), [(1, 32), (1000, 64), (10240, 256)])
def test_decoupled_look_back(count: int, threads: int) -> None:
    given = torch.randint(0, 1000, (count,), dtype=torch.int32)
    got = torch.full_like(given, -1)
    blocks = -(-count // threads)
    ticket, published = words(0), torch.zeros(blocks, dtype=torch.int64)
    arguments = struct.pack("PPPPI4x", *(x.data_ptr() for x in (given, got, ticket, published)), count)
    Emulated(SCAN).function(f"scan<{threads}>").launch(blocks, threads, threads // 32 * 4, arguments)
    assert torch.equal(got, given.cumsum(0).int())
    assert ticket.item() == blocks


def test_a_missing_barrier_shows() -> None:
    """One block runs forwards and one backwards, so in one of them the reader comes before the writer."""
    body = "__shared__ unsigned x[64]; unsigned i = threadIdx.x; x[i] = i; {} a.data[blockIdx.x * 64 + i] = x[63 - i];"
    data = torch.zeros(128, dtype=torch.int32)
    launch(body.format("__syncthreads();"), data, grid=2, block=64)
    assert data.tolist() == list(range(63, -1, -1)) * 2
    launch(body.format(""), data, grid=2, block=64)
    assert data[:64].tolist() != data[64:].tolist()
    assert -1 in data[:64].tolist() and -1 in data[64:].tolist()  # from shared memory that nobody has written


def test_a_thread_may_spin_on_another_with_nanosleep() -> None:
    data = words(0, 0)
    launch(
        "__shared__ volatile unsigned flag; flag = 0; __syncthreads();"
        "if (threadIdx.x == 0) { while (!flag) __nanosleep(20); a.data[0] = 5; }"
        "else if (threadIdx.x == 31) flag = 1;",
        data,
    )
    assert data.tolist() == [5, 0]


def test_atomics_return_what_was_there() -> None:
    data = words(5, 0, 0, 0, 0, 0)
    launch(
        "unsigned old = atomicAdd(a.data, 2); if (threadIdx.x == 3) a.data[1] = old;"
        "atomicMax(a.data + 2, threadIdx.x); if (threadIdx.x == 9) a.data[3] = atomicExch(a.data + 4, 7);"
        "atomicAdd(reinterpret_cast<int*>(a.data) + 5, -1);",
        data,
    )
    assert data.tolist() == [69, 11, 31, 0, 7, -32]


def test_integer_intrinsics() -> None:
    data = torch.zeros(16, dtype=torch.int32)
    launch(
        "unsigned i = 0; auto put = [&](unsigned x) { a.data[i++] = x; }; put(__popc(0xf0f0f001u)); put(__clz(0));"
        "put(__clz(1 << 20)); put(__ffs(0)); put(__ffs(8)); put(__umulhi(1u << 31, 6));"
        "put(__byte_perm(0x33221100, 0x77665544, 0x6714)); put(__funnelshift_l(0x80000000u, 1, 33));"
        "put(__funnelshift_r(2, 3, 1)); put(__brev(1) >> 28); put(min(3u, 5u)); put(max(-1, 2)); put(__ldg(a.data));"
        "put(make_uint4(1, 2, 3, 4).z); put(alignof(uint4) + alignof(float2)); put(sizeof(uchar4));",
        data,
        block=1,
    )
    assert data.tolist() == [13, 32, 11, 0, 4, 3, 0x66771144, 3, (1 << 31) + 1 - (1 << 32), 8, 3, 2, 13, 3, 24, 4]


def test_floats_round_where_they_say() -> None:
    """(1 + e)(1 - e) - 1 is 0 when the product is rounded, and -e² when it is not."""
    data = torch.zeros(3, dtype=torch.float32)
    launch(
        "float* y = reinterpret_cast<float*>(a.data); float e = __uint_as_float(a.n);"
        "y[0] = (1 + e) * (1 - e) - 1; y[1] = fmaf(1 + e, 1 - e, -1); y[2] = 1e-30f * 1e-10f;",
        data,
        n=0x39000000,
        block=1,
    )
    tiny = (torch.tensor(1e-30) * torch.tensor(1e-10)).item()
    assert data.tolist() == [0, -(2.0**-26), tiny] and tiny > 0


def test_floats_to_integers_saturate() -> None:
    values = torch.tensor([2.5, 3.5, -1.5, 3e9, -3e9, float("nan"), float("inf"), 1e10])
    data = torch.cat([values.view(torch.int32), torch.zeros(8, dtype=torch.int32)])
    launch(
        "float x = __uint_as_float(a.data[threadIdx.x]); unsigned i = threadIdx.x; __syncthreads();"
        "a.data[i] = __float2int_rn(x); a.data[8 + i] = __float2uint_rz(x);",
        data,
        block=8,
    )
    low, high = -(1 << 31), (1 << 31) - 1
    assert data[:8].tolist() == [2, 4, -2, high, low, 0, high, high]
    assert data[8:].tolist() == [2, 3, 0, int(3e9) - (1 << 32), 0, 0, -1, -1]


def test_half_to_float_is_exact() -> None:
    data = torch.arange(1 << 16, dtype=torch.int32)
    launch("unsigned i = 256 * blockIdx.x + threadIdx.x; a.data[i] = __float_as_uint(simt_half_to_float(i));",
           data, grid=256, block=256)  # fmt: skip
    expected = torch.arange(1 << 16).to(torch.uint16).view(torch.float16).float()
    number = ~expected.isnan()
    assert torch.equal(data[number], expected[number].view(torch.int32))
    assert data[~number].view(torch.float32).isnan().all()


def test_float_to_half_is_rounded_to_nearest_even() -> None:
    halves = torch.arange(1 << 16).to(torch.uint16).view(torch.float16).float()
    halves = halves[halves.isfinite()].sort().values
    middles = (halves[1:] + halves[:-1]) / 2
    edges = torch.tensor([65519.996, 65520.0, -65520.0, 1e30, float("inf"), -float("inf"), 1e-45, -1e-45, -0.0])
    x = torch.cat([halves, middles, middles.nextafter(torch.tensor(1e9)), middles.nextafter(torch.tensor(-1e9)), edges])
    x = torch.cat([x, x.new_zeros(-x.numel() % 256)])
    data = x.view(torch.int32).clone()
    body = "unsigned i = 256 * blockIdx.x + threadIdx.x; a.data[i] = simt_float_to_half_rn(__uint_as_float(a.data[i]));"
    launch(body, data, grid=x.numel() // 256, block=256)
    assert torch.equal(data.to(torch.uint16).view(torch.int16), x.half().view(torch.int16))
    data = torch.full((256,), 0x7FC00001, dtype=torch.int32)
    launch(body, data, block=256)
    assert data.tolist() == [0x7FFF] * 256


def test_launches_come_from_any_thread() -> None:
    data = [torch.zeros(64, dtype=torch.int32) for _ in range(8)]
    body = "__shared__ unsigned x; if (threadIdx.x == 0) x = a.n; __syncthreads(); a.data[threadIdx.x] = x;"
    one_off(body)
    threads = [threading.Thread(target=launch, args=(body, x, n), kwargs={"block": 64}) for n, x in enumerate(data)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [x.tolist() for x in data] == [[n] * 64 for n in range(8)]


MISTAKES = {
    "returned before a barrier": (
        "if (threadIdx.x == 7) return; __syncthreads();",
        "thread 0: waits in __syncthreads for thread 7, which has returned",
    ),
    "returned before a vote": (
        "if (threadIdx.x == 7) return; a.data[0] = __ballot_sync(~0u, 1);",
        "thread 0: waits in __ballot_sync for thread 7, which has returned",
    ),
    "two barriers": (
        "if (threadIdx.x < 4) __syncwarp(); else __syncthreads();",
        "thread 0: waits in __syncwarp for thread 4, which waits in __syncthreads",
    ),
    "two operations": (
        "if (threadIdx.x < 4) __any_sync(~0u, 1); else __all_sync(~0u, 1);",
        "thread 31: meets thread 0 of its warp, which is in __any_sync, in __all_sync",
    ),
    "lane left out": ("__syncwarp(1u);", "thread 1: calls __syncwarp with mask 0x00000001, .* leaves out its lane 1"),
    "spins": ("while (a.n) __nanosleep(20);", "thread .*: spins"),
    "bad address": ("reinterpret_cast<unsigned*>(64)[threadIdx.x] = 1;", "thread 0: bad memory access at address 0x40"),
    "misaligned": ("reinterpret_cast<volatile uint4*>(a.data + 1)->x = 1;", "thread 0: misaligned access"),
    "past an array": ("__shared__ unsigned x[8]; x[threadIdx.x] = 1;", "thread 8: .*index past the end of an array"),
    "shift": ("a.data[0] = 1u << (threadIdx.x + 4);", "thread 28: .*shift by too much"),
    "stack": ("volatile unsigned char x[1 << 17]; x[0] = 1;", "thread 0: bad memory access"),
    "past dynamic memory": (
        "extern __shared__ unsigned char memory[]; memory[threadIdx.x] = 1;",
        "block 0: wrote byte 16 of dynamic shared memory, of 16",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(mistake: str) -> None:
    """All are in one kernel, which is told by a number which one to make."""
    bodies = [body for body, _ in MISTAKES.values()]
    made = "".join(f"__noinline__ void make{n}(Arguments a) {{ {body} }}\n" for n, body in enumerate(bodies))
    body = "switch (a.n) {" + "".join(f"case {n}: return make{n}(a);" for n in range(len(MISTAKES))) + "}"
    body += "a.data[threadIdx.x] = 3;"
    data = torch.zeros(32, dtype=torch.int32)
    with pytest.raises(LowtideError, match=MISTAKES[mistake][1]):
        launch(body, data, n=list(MISTAKES).index(mistake), shared=16, declarations=made)
    launch(body, data, n=len(MISTAKES), declarations=made)
    assert data.tolist() == [3] * 32, "a launch after a failed one"


def test_a_launch_is_checked() -> None:
    kernel = one_off("a.data[0] = 1;")
    with pytest.raises(LowtideError, match="once: kernel: its argument has 16 bytes, received 8"):
        kernel.launch(1, 32, 0, bytes(8))
    with pytest.raises(LowtideError, match="no such launch: 1 blocks of 1025 threads"):
        kernel.launch(1, 1025, 0, bytes(16))
    with pytest.raises(LowtideError, match=r"once\.cu:2.* error: .*nonsense"):
        one_off("nonsense;")
