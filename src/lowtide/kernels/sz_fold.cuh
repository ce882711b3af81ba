// Two tensors coded as one that is never in memory: the input of a batch norm (`x`) and what ReLU made of its output
// (`other`) are folded while they are encoded, and unfolded while they are decoded (lowtide.coding.fold). The values that
// are coded are of float32, under one bound; WHERE says how elements find their channel, and with it their column of
// `table`: INNER, FIXED, or MANY for runs.
template <typename S, int WHERE> struct Folded { float value; };

template <typename S, int WHERE> struct Type<Folded<S, WHERE>> : Type<float> {};
template <typename S, int WHERE> __device__ __forceinline__ float widen(Folded<S, WHERE> x) { return x.value; }
template <typename S, int WHERE> __device__ __forceinline__ void narrow(float x, Folded<S, WHERE>* y) { y->value = x; }

// What lies in memory, and what is coded.
template <typename T> struct Lies {
  using In = T;
  using Coded = T;
  static constexpr bool folded = false;
};
template <typename S, int WHERE> struct Lies<Folded<S, WHERE>> {
  using In = S;
  using Coded = float;
  static constexpr bool folded = true;
};

template <typename S, int WHERE> struct Group<Folded<S, WHERE>> {
  Group<S> x, y;
};
template <bool WHOLE, typename S, int WHERE>
__device__ __forceinline__ void load(Group<Folded<S, WHERE>>& group, const Args& a, const void* x, u64 g) {
  load<WHOLE>(group.x, a, x, g);
  load<WHOLE>(group.y, a, a.other, g);
}

// A row of the table for the four values of a group, the first of which belongs to `channel`.
template <int WHERE>
__device__ __forceinline__ void read_columns(const Args& a, int row, u32 channel, float* numbers) {
  const float* at = a.table + row * a.modulo + channel;
  if (Entry<WHERE>::inner) {
    float4 v = __ldg((const float4*)at);
    numbers[0] = v.x, numbers[1] = v.y, numbers[2] = v.z, numbers[3] = v.w;
  } else {
    numbers[0] = numbers[1] = numbers[2] = numbers[3] = __ldg(at);
  }
}

// Turns groups as they lie into groups that are coded, row by row.
template <typename T, int STEP> struct Folder {
  __device__ __forceinline__ void begin(const Args&, u64) {}
  __device__ __forceinline__ Group<T> next(const Args&, const Group<T>& group) { return group; }
};
template <typename S, int WHERE, int STEP> struct Folder<Folded<S, WHERE>, STEP> {
  Walk<WHERE, STEP> walk;
  float zero[4], per_fine[4], per_coarse[4];
  __device__ __forceinline__ void read(const Args& a) {
    const u32 channel = walk.of(a, 0);
    read_columns<WHERE>(a, folding::ZERO, channel, zero);
    read_columns<WHERE>(a, folding::PER_FINE, channel, per_fine);
    read_columns<WHERE>(a, folding::PER_COARSE, channel, per_coarse);
  }
  __device__ __forceinline__ void begin(const Args& a, u64 g) {
    walk.begin(a, g);
    if (Entry<WHERE>::constant) read(a);
  }
  __device__ __forceinline__ Group<float> next(const Args& a, const Group<Folded<S, WHERE>>& group) {
    if (!Entry<WHERE>::constant) read(a);
    float t[4];
#pragma unroll
    for (int k = 0; k < 4; ++k)
      t[k] = folding::folded(group.x.at(k), group.y.at(k), zero[k], per_fine[k], per_coarse[k]);
    Group<float> folded;
    folded.set(t);
    walk.next(a);
    return folded;
  }
};

// Element i of what is coded.
template <typename T> struct Element {
  static __device__ __forceinline__ T at(const Args& a, u64 i) { return ((const T*)a.x)[i]; }
};
template <typename S, int WHERE> struct Element<Folded<S, WHERE>> {
  static __device__ __forceinline__ Folded<S, WHERE> at(const Args& a, u64 i) {
    const float* column = a.table + entry_of<WHERE>(a, i);
    float x = widen(((const S*)a.x)[i]), y = widen(((const S*)a.other)[i]), zero = __ldg(column + folding::ZERO * a.modulo);
    return {folding::folded(x, y, zero, __ldg(column + folding::PER_FINE * a.modulo),
                            __ldg(column + folding::PER_COARSE * a.modulo))};
  }
};

// What a decoder gives of a pair: what ReLU made; the norm's input; that and, in `beside`, what ReLU lets through of the
// gradient in `other`.
constexpr bool UNFOLDS(int give) { return give >= MADE; }

// The other way: values t of a group, row by row. Codes never lie as far as what is told by its size alone.
template <typename T, int GIVE> struct Unfolder {
  __device__ __forceinline__ void begin(const Args&, u64) {}
};
template <typename S, int WHERE, int GIVE> struct Unfolder<Folded<S, WHERE>, GIVE> {
  Walk<WHERE> walk;
  float from[4], on[4], off[4];
  __device__ __forceinline__ void read(const Args& a) {
    const u32 channel = walk.of(a, 0);
    read_columns<WHERE>(a, GIVE == MADE ? folding::LOWEST : folding::ZERO, channel, from);
    read_columns<WHERE>(a, GIVE == MADE ? folding::STEEP : folding::FINE, channel, on);
    if (GIVE != MADE) read_columns<WHERE>(a, folding::COARSE, channel, off);
  }
  __device__ __forceinline__ void begin(const Args& a, u64 g) {
    walk.begin(a, g);
    if (Entry<WHERE>::constant) read(a);
  }
  template <bool WHOLE>
  __device__ __forceinline__ void put(const Args& a, const float* t, const Group<S>& gradient, u64 g) {
    if (!Entry<WHERE>::constant) read(a);
    float y[4];
    bool is_off[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      is_off[k] = t[k] <= 0;
      float distance = fabsf(t[k]) - (is_off[k] ? folding::OFF : folding::ON);
      y[k] = distance * (GIVE != MADE && is_off[k] ? -off[k] : on[k]) + from[k];
      if (GIVE == MADE && is_off[k]) y[k] = 0.0f;
    }
    Group<S> group;
    group.set(y);
    store<WHOLE>(group, a, a.x, g);
    if (GIVE == SOURCE_AND_GATED) {
      Group<S> passed = gradient;
      clear(passed, is_off);
      store<WHOLE>(passed, a, a.beside, g);
    }
    walk.next(a);
  }
};

template <typename T, int GIVE> struct Unfolded {
  static __device__ __forceinline__ void put(const Args&, u64, float) {}
};
template <typename S, int WHERE, int GIVE> struct Unfolded<Folded<S, WHERE>, GIVE> {
  static __device__ __forceinline__ void put(const Args& a, u64 i, float t) {
    const float* column = a.table + entry_of<WHERE>(a, i);
    auto number = [&](int row) { return __ldg(column + row * a.modulo); };
    float y = GIVE == MADE ? folding::made_of(t, number(folding::STEEP), number(folding::LOWEST))
                           : folding::source_of(t, number(folding::ZERO), number(folding::FINE), number(folding::COARSE));
    narrow(y, (S*)a.x + i);
    if (GIVE == SOURCE_AND_GATED) ((S*)a.beside)[i] = t <= 0 ? S{} : ((const S*)a.other)[i];
  }
};
