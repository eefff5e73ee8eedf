// Which keys of a panel a row may see, and how its scores are made from q.k.

constexpr int PANEL = NV * W;
constexpr uint32_t ALL = PANEL == 32 ? 0xffffffffu : (1u << (PANEL % 32)) - 1u;
static_assert(PANEL <= 32, "visibility is kept in 32-bit words");
static_assert(MR <= W || MR % W == 0, "queries are turned in whole vectors");

HEADWISE_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
HEADWISE_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// Bits of the keys [low, high) in a panel that starts at `start`.
HEADWISE_INLINE uint32_t range_bits(int64_t low, int64_t high, int64_t start) {
  const int64_t a = most(low - start, 0), b = least(high - start, PANEL);
  if (b <= a) return 0;
  const uint32_t upto = b >= 32 ? 0xffffffffu : (1u << b) - 1u;
  return upto & ~(a ? (1u << a) - 1u : 0u);
}

HEADWISE_INLINE uint32_t some_byte_bits(const uint8_t* p, int64_t n) {
  if (n >= 32) return byte_bits(p) & ALL;
  uint32_t bits = 0;
  for (int64_t i = 0; i < least(n, PANEL); ++i) bits |= (uint32_t)(p[i] != 0) << i;
  return bits;
}

template <class T>
HEADWISE_INLINE const T* plane_row(const Plane& plane, int64_t b, int64_t h, int64_t q) {
  return (const T*)plane.data + b * plane.batch + h * plane.head + q * plane.query;
}

template <class T>
HEADWISE_INLINE F load_some(const T* p, int64_t n) {
  return n >= W ? load(p) : load_first(p, n > 0 ? (int)n : 0);
}

// Vector j of a row of a plane in the panel at `start`, of which n keys exist; a key stride of 0 repeats one value.
template <class T>
HEADWISE_INLINE F plane_vector(const Plane& plane, const T* row, int64_t start, int64_t n, int j) {
  if (plane.key) return load_some(row + start + j * W, n - j * W);
  float lanes[W];
  store(lanes, load_first(row, 1));
  return set1(lanes[0]);
}

template <class T>
static uint32_t bias_bits(const Plane& plane, const T* row, int64_t start, int64_t n, float lowest) {
  uint32_t bits = 0;
  for (int j = 0; j < NV; ++j)
    if (n > j * W) bits |= above_bits(plane_vector(plane, row, start, n, j), set1(lowest)) << (j * W);
  return bits;
}

// Float32 hides from the lowest bfloat16 on, so that a mask made in half precision and widened later still hides.
constexpr float kLowestBf16 = -3.3895313892515355e38f, kLowestF16 = -65504.0f;

// Keys of the panel at `start` that the row may see; `real` are the keys that are not padding.
static uint32_t visible_bits(const Call& c, const Row& row, int64_t b, int64_t start, uint32_t real) {
  uint32_t bits = range_bits(row.low, row.high, start) & real;
  const int64_t n = c.K - start;
  if (bits && c.mask.data) {
    const uint8_t* mask = plane_row<uint8_t>(c.mask, b, row.head, row.query);
    bits &= c.mask.key ? some_byte_bits(mask + start, n) : *mask ? ALL : 0;
  }
  for (int i = 0; i < 2 && bits && c.bias[i].data; ++i) {
    const Plane& bias = c.bias[i];
    if (c.bias_type[i] == Type::f32)
      bits &= bias_bits(bias, plane_row<float>(bias, b, row.head, row.query), start, n, kLowestBf16);
    else if (c.bias_type[i] == Type::bf16)
      bits &= bias_bits(bias, plane_row<bf16>(bias, b, row.head, row.query), start, n, kLowestBf16);
    else
      bits &= bias_bits(bias, plane_row<f16>(bias, b, row.head, row.query), start, n, kLowestF16);
  }
  return bits;
}

HEADWISE_INLINE F tanh(F x) {
  const F size = abs(x), square = mul(x, x);
  F small = set1(-0.005704227856166037f);
  small = fma(small, square, set1(0.020638434821374705f));
  small = fma(small, square, set1(-0.053739524013332915f));
  small = fma(small, square, set1(0.13331440024590951f));
  small = fma(small, square, set1(-0.33333281866731007f));
  small = fma(mul(small, square), x, x);
  // 1 - 2 / (exp(2 |x|) + 1), which is 1 beyond 20; the larger operand order keeps NaN
  const F capped = sub(set1(0.0f), max(set1(-20.0f), sub(set1(0.0f), size)));
  const F grown = exp2(mul(capped, set1(2.0f * kLog2e)));
  const F large = sub(set1(1.0f), div(set1(2.0f), add(grown, set1(1.0f))));
  const uint32_t far = above_bits(size, set1(0.625f)), negative = above_bits(set1(0.0f), x);
  const F signed_large = select(negative, sub(set1(0.0f), large), large);
  return select(far, signed_large, small);
}

template <class T>
static void add_bias(float* s, const Plane& plane, const T* row, int64_t start, int64_t n) {
  for (int j = 0; j < NV; ++j)
    store(s + j * W, fma(plane_vector(plane, row, start, n, j), set1(kLog2e), load(s + j * W)));
}

// Soft cap and biases on one panel of one row.
static void bend_scores(const Call& c, const Row& row, int64_t b, int64_t start, float* s) {
  const int64_t n = c.K - start;
  if (c.softcap > 0.0f) {
    const F cap = set1(c.softcap * kLog2e), inverse = set1(1.0f / (c.softcap * kLog2e));
    for (int j = 0; j < NV; ++j) store(s + j * W, mul(cap, tanh(mul(load(s + j * W), inverse))));
  }
  for (int i = 0; i < 2 && c.bias[i].data; ++i) {
    const Plane& bias = c.bias[i];
    if (c.bias_type[i] == Type::f32) add_bias(s, bias, plane_row<float>(bias, b, row.head, row.query), start, n);
    else if (c.bias_type[i] == Type::bf16) add_bias(s, bias, plane_row<bf16>(bias, b, row.head, row.query), start, n);
    else add_bias(s, bias, plane_row<f16>(bias, b, row.head, row.query), start, n);
  }
  if (c.distance_bias) {
    const Plane table = {c.distance_bias, 0, 0, 0, 1};
    const float* of_head = c.distance_bias + row.head * c.distance_bias_head;
    add_bias(s, table, of_head, start - (row.query + c.offset) + c.distance_zero, n);
  }
}

HEADWISE_INLINE bool bends(const Call& c) { return c.softcap > 0.0f || c.bias[0].data || c.distance_bias; }

HEADWISE_INLINE void hide(float* s, uint32_t bits) {
  const F hidden = set1(kHidden);
  HEADWISE_UNROLL
  for (int j = 0; j < NV; ++j)
    store(s + j * W, select(W == 32 ? bits : (bits >> (j * W)) & ((1u << (W % 32)) - 1u), load(s + j * W), hidden));
}
