// The coder `blocks` for small integers: what lowtide.coding.integers writes and reads, a warp a chunk, a lane a block.
//
// `measure` says how long every chunk is and writes its headers; once the lengths are summed, `pack` reads the integers
// again and puts each chunk where it belongs. So nothing is staged, and no word is written twice.

// As packed by lowtide/kernels/_integers.py.
struct Args {
  const void* source;  // integers, for the encoder
  void* target;        // the same, for the decoder
  u8* headers;
  int* lengths;        // of chunks, in words
  const int* offsets;
  u32* words;
  const u64* costs;    // of codes and of residuals: the smaller decides, where `prediction` leaves it open
  u32 count, centre, width, height, prediction;
};

constexpr u32 CHUNK = 1024, WARPS = 8;
constexpr u32 NIBBLES = 0x11111111;
constexpr int LARGEST = 2047;
enum { NEVER, ALWAYS, AUTO };

// ---- where integers come from ------------------------------------------------------------------------------------

struct Shorts {  // as they are
  using Element = short;
  static __device__ __forceinline__ int code(const Args&, short v) { return v; }
  static __device__ __forceinline__ short element(const Args&, int v) { return (short)v; }
};
struct Bytes {  // counted from a centre
  using Element = u8;
  static __device__ __forceinline__ int code(const Args& a, u8 v) { return (int)v - (int)a.centre; }
  static __device__ __forceinline__ u8 element(const Args& a, int v) { return (u8)(v + (int)a.centre); }
};
struct Maps {  // less what their neighbours in the plane let expect; some integers are no codes, and count as zero
  using Element = short;
  static __device__ __forceinline__ int code(const Args&, short v) { return v == -32768 ? 0 : v; }
};

// Integers i .. i + 3, zeros past the end.
template <typename SOURCE> struct Reader {
  __device__ __forceinline__ Reader(const Args&) {}
  __device__ __forceinline__ void read(const Args& a, u32 i, int* code) const {
    u32 left = i < a.count ? a.count - i : 0;
    auto four = load_four((const typename SOURCE::Element*)a.source + i, left);
#pragma unroll
    for (u32 k = 0; k < 4; ++k) code[k] = k < left ? SOURCE::code(a, four.v[k]) : 0;
  }
};
template <> struct Reader<Maps> {
  bool predicted;
  __device__ __forceinline__ Reader(const Args& a)
      : predicted(a.prediction == AUTO ? a.costs[1] < a.costs[0] : a.prediction == ALWAYS) {}
  static __device__ __forceinline__ int at(const Args& a, u32 i) {
    return Maps::code(a, __ldg((const short*)a.source + i));
  }
  // Integer i less its prediction, in column x of row y.
  static __device__ __forceinline__ int residual(const Args& a, u32 i, u32 x, u32 y) {
    int here = at(a, i);
    if (x) here -= at(a, i - 1);
    if (y) here -= at(a, i - a.width);
    if (x && y) here += at(a, i - a.width - 1);
    return here;
  }
  __device__ __forceinline__ void read(const Args& a, u32 i, int* code) const {
    u32 row = i / a.width, x = i - row * a.width, y = row % a.height;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      code[k] = i + k >= a.count ? 0 : predicted ? residual(a, i + k, x, y) : at(a, i + k);
      if (++x == a.width) x = 0, y = y + 1 == a.height ? 0 : y + 1;
    }
  }
};

// ---- blocks ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 width_of(u32 klass) { return klass < 6 ? klass : klass == 6 ? 7 : 11; }
__device__ __forceinline__ u32 class_of(u32 magnitudes) {  // or-ed together
  u32 length = 32 - __clz((int)magnitudes);
  return length <= 5 ? length : length <= 7 ? 6 : 7;
}
__device__ __forceinline__ bool is_lost(int code) { return code > LARGEST || code < -LARGEST; }

// What a chunk takes, and a lane's part in it.
struct Shape {
  u32 klass, is_signed, width, before, planes, lost, length, valid;
  bool raw;
};
__device__ __forceinline__ Shape shape_of(const Args& a, const int* code, u32 chunk, u32 lane) {
  Shape s;
  u32 all = 0, negative = 0, lost = 0;
#pragma unroll
  for (int n = 0; n < 32; ++n) {
    bool apart = is_lost(code[n]);
    lost += apart;
    all |= apart ? 0 : (u32)(code[n] < 0 ? -code[n] : code[n]);
    negative |= !apart && code[n] < 0;
  }
  s.klass = class_of(all), s.is_signed = negative, s.width = width_of(s.klass);
  u32 mine = s.width + s.is_signed, upto = sum_to(mine, lane);
  s.before = upto - mine;
  s.planes = __shfl_sync(~0u, upto, 31);
  s.lost = sum_of(lost);
  s.valid = min(a.count - chunk * CHUNK, CHUNK);
  u32 as_raw = (s.valid + 1) / 2;
  s.raw = s.planes + s.lost >= as_raw;
  s.length = s.raw ? as_raw : s.planes + s.lost;
  return s;
}

template <typename SOURCE>
__device__ __forceinline__ void read_block(const Args& a, u32 chunk, u32 lane, int* code) {
  Reader<SOURCE> reader(a);
#pragma unroll
  for (u32 j = 0; j < 8; ++j) reader.read(a, chunk * CHUNK + 128 * j + 4 * lane, code + 4 * j);
}

template <typename SOURCE> __global__ void __launch_bounds__(32 * WARPS) measure(const Args a) {
  u32 chunk = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (chunk * (u64)CHUNK >= a.count) return;
  int code[32];
  read_block<SOURCE>(a, chunk, lane, code);
  Shape s = shape_of(a, code, chunk, lane);
  u32 nibble = s.raw ? (lane == 0 ? 8 : 0) : s.klass + 8 * s.is_signed;
  u32 upper = __shfl_down_sync(~0u, nibble, 1);
  if (lane % 2 == 0) a.headers[(u64)chunk * 16 + lane / 2] = (u8)(nibble | upper << 4);
  if (lane == 0) a.lengths[chunk] = (int)s.length;
}

// Bits FROM .. FROM + 3 of 32 magnitudes, of which `width` planes are stored.
template <int FROM> __device__ __forceinline__ void write_planes(const int* code, u32 width, u32* out) {
  u32 nibbles[4] = {0, 0, 0, 0};
#pragma unroll
  for (int n = 0; n < 32; ++n) nibbles[n / 8] |= ((u32)code[n] >> FROM & 15) << (4 * (n % 8));
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    if (FROM + p >= width) continue;
    u32 word = 0;
#pragma unroll
    for (int w = 0; w < 4; ++w) word |= (nibbles[w] >> p & NIBBLES) << w;
    out[FROM + p] = word;
  }
}
template <int FROM> __device__ __forceinline__ void read_planes(int* code, u32 width, const u32* in) {
  u32 nibbles[4] = {0, 0, 0, 0};
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    if (FROM + p >= width) continue;
    u32 word = in[FROM + p];
#pragma unroll
    for (int w = 0; w < 4; ++w) nibbles[w] |= (word >> w & NIBBLES) << p;
  }
#pragma unroll
  for (int n = 0; n < 32; ++n) code[n] |= (int)((nibbles[n / 8] >> (4 * (n % 8)) & 15) << FROM);
}

// In order of position: row after row of 128 integers, read once more rather than remembered.
template <typename SOURCE>
__device__ __forceinline__ void write_escapes(const Args& a, u32 chunk, u32 lane, u32* out) {
  Reader<SOURCE> reader(a);
#pragma unroll 1
  for (u32 j = 0; j < 8; ++j) {
    u32 position = 128 * j + 4 * lane, mine = 0;
    int code[4];
    reader.read(a, chunk * CHUNK + position, code);
#pragma unroll
    for (u32 k = 0; k < 4; ++k) mine += is_lost(code[k]);
    u32 upto = sum_to(mine, lane);
    u32* to = out + (upto - mine);
#pragma unroll
    for (u32 k = 0; k < 4; ++k)
      if (is_lost(code[k])) *to++ = (position + k) << 16 | (u32)(code[k] & 0xffff);
    out += __shfl_sync(~0u, upto, 31);
  }
}

template <typename SOURCE> __global__ void __launch_bounds__(32 * WARPS, 2) pack(const Args a) {
  u32 chunk = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (chunk * (u64)CHUNK >= a.count) return;
  int code[32];
  read_block<SOURCE>(a, chunk, lane, code);
  Shape s = shape_of(a, code, chunk, lane);
  u32* out = a.words + a.offsets[chunk];
  if (s.raw) {  // whoever has four neighbours has two whole words
#pragma unroll
    for (u32 j = 0; j < 8; ++j) {
      u32 first = 64 * j + 2 * lane;
#pragma unroll
      for (u32 k = 0; k < 2; ++k)
        if (first + k < s.length)
          out[first + k] = (u32)(code[4 * j + 2 * k] & 0xffff) | (u32)code[4 * j + 2 * k + 1] << 16;
    }
    return;
  }
  u32* escapes = out + s.planes;
  out += s.before;
  u32 signs = 0;
#pragma unroll
  for (int n = 0; n < 32; ++n) {
    bool apart = is_lost(code[n]), negative = !apart && code[n] < 0;
    signs |= (u32)negative << (4 * (n % 8) + n / 8);
    code[n] = apart ? 0 : negative ? -code[n] : code[n];
  }
  write_planes<0>(code, s.width, out);
  if (s.width > 4) write_planes<4>(code, s.width, out);
  if (s.width > 8) write_planes<8>(code, s.width, out);
  if (s.is_signed) out[s.width] = signs;
  if (s.lost) write_escapes<SOURCE>(a, chunk, lane, escapes);
}

template <typename TARGET> __global__ void __launch_bounds__(32 * WARPS) unpack(const Args a) {
  using Element = typename TARGET::Element;
  u32 chunk = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (chunk * (u64)CHUNK >= a.count) return;
  u32 start = chunk * CHUNK, valid = min(a.count - start, CHUNK);
  u32 nibble = a.headers[(u64)chunk * 16 + lane / 2] >> (4 * (lane % 2)) & 15;
  const u32* in = a.words + a.offsets[chunk];
  u32 length = (u32)(a.offsets[chunk + 1] - a.offsets[chunk]);
  Element* to = (Element*)a.target + start;
  if ((__shfl_sync(~0u, nibble, 0) & 15) == 8) {
    for (u32 i = lane; i < valid; i += 32) to[i] = TARGET::element(a, (short)(in[i / 2] >> (16 * (i % 2))));
    return;
  }
  u32 width = width_of(nibble & 7), is_signed = nibble >> 3, upto = sum_to(width + is_signed, lane);
  u32 planes = __shfl_sync(~0u, upto, 31);
  const u32* block = in + (upto - width - is_signed);
  int code[32];
#pragma unroll
  for (int n = 0; n < 32; ++n) code[n] = 0;
  read_planes<0>(code, width, block);
  if (width > 4) read_planes<4>(code, width, block);
  if (width > 8) read_planes<8>(code, width, block);
  u32 signs = is_signed ? block[width] : 0;
#pragma unroll
  for (u32 j = 0; j < 8; ++j) {
    Four<Element> four;
#pragma unroll
    for (u32 k = 0; k < 4; ++k) {
      u32 n = 4 * j + k;
      four.v[k] = TARGET::element(a, signs >> (4 * (n % 8) + n / 8) & 1 ? -code[n] : code[n]);
    }
    u32 i = 128 * j + 4 * lane;
    store_four(to + i, i < valid ? valid - i : 0, four);
  }
  if (length > planes) {
    __syncwarp();  // escapes overwrite what other lanes have just stored
    for (u32 e = planes + lane; e < length; e += 32) {
      u32 position = in[e] >> 16;
      if (position < valid) to[position] = TARGET::element(a, (short)in[e]);
    }
  }
}

// ---- prediction --------------------------------------------------------------------------------------------------

// Bits of some codes and of their residuals: of every `centre`-th one.
template <typename SOURCE> __global__ void __launch_bounds__(32 * WARPS) survey(const Args a) {
  u64 i = ((u64)blockIdx.x * (32 * WARPS) + threadIdx.x) * a.centre;
  u32 plain = 0, predicted = 0;
  if (i < a.count) {
    using From = Reader<SOURCE>;  // none is made: it would read the costs, which are being added up
    u32 row = (u32)i / a.width, x = (u32)i - row * a.width;
    int code = From::at(a, (u32)i), residual = From::residual(a, (u32)i, x, row % a.height);
    plain = 32 - __clz(code < 0 ? -code : code);
    predicted = 32 - __clz(residual < 0 ? -residual : residual);
  }
  plain = sum_of(plain), predicted = sum_of(predicted);
  if (threadIdx.x % 32 == 0) {
    atomicAdd((u64*)a.costs, (u64)plain);
    atomicAdd((u64*)a.costs + 1, (u64)predicted);
  }
}

// Residuals to integers, in place: sums along each row, on top of the row before. A warp a plane.
template <typename TARGET> __global__ void __launch_bounds__(32 * WARPS) accumulate(const Args a) {
  u64 area = (u64)a.width * a.height, start = ((u64)blockIdx.x * WARPS + threadIdx.x / 32) * area;
  u32 lane = threadIdx.x % 32;
  if (start >= a.count) return;
  short* row = (short*)a.target + start;
  for (u32 y = 0; y < a.height; ++y, row += a.width) {
    u32 carry = 0;
    for (u32 first = 0; first < a.width; first += 32) {
      u32 x = first + lane;
      bool inside = x < a.width;
      u32 sum = sum_to(inside ? (u16)row[x] : 0, lane) + carry;
      carry = __shfl_sync(~0u, sum, 31);
      if (inside) row[x] = (short)(sum + (y ? (u16)row[(long long)x - a.width] : 0));
    }
  }
}
