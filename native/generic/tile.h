// Register tiles: scores from packed keys, scores along keys as they lie, and weights times values.
// Included inside the namespace of a target, after its vocabulary.

// s[r][0 .. N * W) = sum_d q[d][r] * k[d][0 .. N * W) for the first N vectors of a panel
template <int R, int N>
HEADWISE_INLINE void scores_tile(const float* q, const float* k, int64_t width, float* s, int64_t ld) {
  F acc[R][N];
HEADWISE_UNROLL
  for (int r = 0; r < R; ++r)
HEADWISE_UNROLL
    for (int j = 0; j < N; ++j) acc[r][j] = set1(0.0f);
  for (int64_t d = 0; d < width; ++d) {
    F key[N];
HEADWISE_UNROLL
    for (int j = 0; j < N; ++j) key[j] = load(k + j * W);
HEADWISE_UNROLL
    for (int r = 0; r < R; ++r) {
      F x = set1(q[r]);
HEADWISE_UNROLL
      for (int j = 0; j < N; ++j) acc[r][j] = fma(x, key[j], acc[r][j]);
    }
    q += R;
    k += NV * W;
  }
HEADWISE_UNROLL
  for (int r = 0; r < R; ++r)
HEADWISE_UNROLL
    for (int j = 0; j < N; ++j) store(s + r * ld + j * W, acc[r][j]);
}

// Rows that are read once from far away are asked for this many rows ahead.
constexpr int64_t AHEAD = 48;

template <class T>
HEADWISE_INLINE void prefetch_row(const T* row, int64_t width) {
  for (int64_t d = 0; d < width; d += 64 / (int64_t)sizeof(T)) prefetch(row + d);
}

// o[r][0 .. N * W) = alpha[r] * o + sum_j p[r][j] * v[j][0 .. N * W); alpha null: o is not read. FAR: v is not in cache.
template <int R, int N, bool FAR, class T>
HEADWISE_INLINE void values_tile(const float* p, int64_t ldp, const T* v, int64_t ldv, int64_t keys, float* o,
                                 int64_t ldo, const float* alpha) {
  F acc[R][N];
HEADWISE_UNROLL
  for (int r = 0; r < R; ++r) {
    F a = alpha ? set1(alpha[r]) : set1(0.0f);
HEADWISE_UNROLL
    for (int j = 0; j < N; ++j) acc[r][j] = alpha ? mul(load(o + r * ldo + j * W), a) : a;
  }
  for (int64_t key = 0; key < keys; ++key) {
    F value[N];
HEADWISE_UNROLL
    for (int j = 0; j < N; ++j) value[j] = load(v + j * W);
    if (FAR) prefetch_row(v + AHEAD * ldv, N * W);
HEADWISE_UNROLL
    for (int r = 0; r < R; ++r) {
      F x = set1(p[r * ldp]);
HEADWISE_UNROLL
      for (int j = 0; j < N; ++j) acc[r][j] = fma(x, value[j], acc[r][j]);
    }
    ++p;
    v += ldv;
  }
HEADWISE_UNROLL
  for (int r = 0; r < R; ++r)
HEADWISE_UNROLL
    for (int j = 0; j < N; ++j) store(o + r * ldo + j * W, acc[r][j]);
}

// As values_tile with one vector of which the first `lanes` exist in v.
template <int R, class T>
HEADWISE_INLINE void values_edge(const float* p, int64_t ldp, const T* v, int64_t ldv, int64_t keys, float* o,
                                 int64_t ldo, const float* alpha, int lanes) {
  F acc[R];
HEADWISE_UNROLL
  for (int r = 0; r < R; ++r) acc[r] = alpha ? mul(load(o + r * ldo), set1(alpha[r])) : set1(0.0f);
  for (int64_t key = 0; key < keys; ++key) {
    F value = load_first(v, lanes);
HEADWISE_UNROLL
    for (int r = 0; r < R; ++r) acc[r] = fma(set1(p[r * ldp]), value, acc[r]);
    ++p;
    v += ldv;
  }
HEADWISE_UNROLL
  for (int r = 0; r < R; ++r) store(o + r * ldo, acc[r]);
}

// All columns of an output tile. Widths need not be a multiple of the vector.
template <int R, int N, bool FAR, class T>
static void values_rows(const float* p, int64_t ldp, const T* v, int64_t ldv, int64_t keys, int64_t width, float* o,
                        int64_t ldo, const float* alpha) {
  int64_t c = 0;
  for (; c + N * W <= width; c += N * W) values_tile<R, N, FAR>(p, ldp, v + c, ldv, keys, o + c, ldo, alpha);
  for (; c + W <= width; c += W) values_tile<R, 1, FAR>(p, ldp, v + c, ldv, keys, o + c, ldo, alpha);
  if (c < width) values_edge<R>(p, ldp, v + c, ldv, keys, o + c, ldo, alpha, (int)(width - c));
}

// s[r][key] = q[r] . k[key] for keys as they lie; q is packed row by row, padded with zeros to whole vectors.
// `next` is what will be read after the last key, in rows of the same width.
template <int R, class T>
static void scores_direct(const float* q, int64_t ldq, const T* k, int64_t ldk, int64_t keys, int64_t width, float* s,
                          int64_t ld, const T* next, int64_t ldn) {
  constexpr int KEYS = W >= 4 * R ? W / R : 4;  // so many sums fill whole vectors
  const int64_t whole = width / W * W;
  const int rest = (int)(width - whole);
  int64_t key = 0;
  for (; key + KEYS <= keys; key += KEYS) {
    const T* row[KEYS];
    F acc[R][KEYS];
HEADWISE_UNROLL
    for (int j = 0; j < KEYS; ++j) {
      row[j] = k + (key + j) * ldk;
      prefetch_row(key + j + AHEAD < keys ? row[j] + AHEAD * ldk : next + (key + j + AHEAD - keys) * ldn, width);
HEADWISE_UNROLL
      for (int r = 0; r < R; ++r) acc[r][j] = set1(0.0f);
    }
    for (int64_t d = 0; d < whole; d += W) {
      F x[R];
HEADWISE_UNROLL
      for (int r = 0; r < R; ++r) x[r] = load(q + r * ldq + d);
HEADWISE_UNROLL
      for (int j = 0; j < KEYS; ++j) {
        F y = load(row[j] + d);
HEADWISE_UNROLL
        for (int r = 0; r < R; ++r) acc[r][j] = fma(x[r], y, acc[r][j]);
      }
    }
    if (rest) {
HEADWISE_UNROLL
      for (int j = 0; j < KEYS; ++j) {
        F y = load_first(row[j] + whole, rest);
HEADWISE_UNROLL
        for (int r = 0; r < R; ++r) acc[r][j] = fma(load(q + r * ldq + whole), y, acc[r][j]);
      }
    }
    float sums[R * KEYS];
HEADWISE_UNROLL
    for (int i = 0; i < R * KEYS / W; ++i) store(sums + i * W, sum_each(&acc[0][0] + i * W));
HEADWISE_UNROLL
    for (int r = 0; r < R; ++r) __builtin_memcpy(s + r * ld + key, sums + r * KEYS, KEYS * sizeof(float));
  }
  for (; key < keys; ++key) {
    for (int r = 0; r < R; ++r) {
      F acc = set1(0.0f);
      for (int64_t d = 0; d < whole; d += W) acc = fma(load(q + r * ldq + d), load(k + key * ldk + d), acc);
      if (rest) acc = fma(load(q + r * ldq + whole), load_first(k + key * ldk + whole, rest), acc);
      s[r * ld + key] = hsum(acc);
    }
  }
}
