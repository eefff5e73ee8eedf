// One block of scores of a row becomes weights relative to the row's maximum so far.

HEADWISE_INLINE float row_max(const float* s, int64_t n) {
  F a = set1(kHidden), b = a, c = a, d = a;
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W) {
    a = max(a, load(s + i));
    b = max(b, load(s + i + W));
    c = max(c, load(s + i + 2 * W));
    d = max(d, load(s + i + 3 * W));
  }
  for (; i < n; i += W) a = max(a, load(s + i));
  return hmax(max(max(a, b), max(c, d)));
}

// The first column whose score equals x, which is there. Four vectors at a time: fewer branches to guess.
HEADWISE_INLINE int64_t first_equal(const float* s, int64_t n, float x) {
  const F want = set1(x);
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W) {
    const uint32_t a = equal_bits(load(s + i), want), b = equal_bits(load(s + i + W), want);
    const uint32_t c = equal_bits(load(s + i + 2 * W), want), d = equal_bits(load(s + i + 3 * W), want);
    const uint64_t bits = (uint64_t)a | (uint64_t)b << W | (uint64_t)c << (2 * W) | (uint64_t)d << (3 * W);
    if (bits) return i + __builtin_ctzll(bits);
  }
  for (; i < n; i += W) {
    const uint32_t bits = equal_bits(load(s + i), want);
    if (bits) return i + __builtin_ctz(bits);
  }
  return 0;
}

// s becomes exp2(s - max); the row's sums are updated. Returns the factor for what was summed before.
// `key_of` maps a column to its key; `straight`: keys follow each other as columns do. Columns are a multiple of W,
// hidden ones hold kHidden.
template <bool STATS, bool DISTANCE, class KeyOf>
HEADWISE_INLINE float softmax_row(float* s, int64_t n, Row& row, int64_t position, KeyOf key_of, bool straight) {
  const float block = row_max(s, n), before = row.max;
  float alpha = 1.0f;
  if (block > before) {
    if (STATS) row.argmax = (int32_t)key_of(first_equal(s, n, block));
    alpha = 0.0f;
    row.max = block;
    if (before > kHidden) {
      float lanes[W];
      store(lanes, exp2(set1(before - block)));
      alpha = lanes[0];
      if (STATS) row.weighted = alpha * (row.weighted + (before - block) * row.sum);
    }
  }
  if (!(row.max > kHidden)) {  // nothing seen yet
    for (int64_t i = 0; i < n; i += W) store(s + i, set1(0.0f));
    return 1.0f;
  }
  const F top = set1(row.max);
  F sum0 = set1(0.0f), sum1 = sum0, weighted0 = sum0, weighted1 = sum0, far = sum0;
  F here = DISTANCE ? add(iota(), set1((float)(key_of(0) - position))) : sum0;
  auto gap = [&](int64_t column) {
    const F found = straight ? here : add(iota(), set1((float)(key_of(column) - position)));
    here = add(here, set1((float)W));
    return abs(found);
  };
  int64_t i = 0;
  for (; i + 2 * W <= n; i += 2 * W) {
    F x0 = sub(load(s + i), top), x1 = sub(load(s + i + W), top);
    F p0 = exp2(x0), p1 = exp2(x1);
    store(s + i, p0);
    store(s + i + W, p1);
    sum0 = add(sum0, p0);
    sum1 = add(sum1, p1);
    if (STATS) {
      weighted0 = fma(p0, x0, weighted0);
      weighted1 = fma(p1, x1, weighted1);
    }
    if (DISTANCE) {
      far = fma(p0, gap(i), far);
      far = fma(p1, gap(i + W), far);
    }
  }
  if (i < n) {
    F x = sub(load(s + i), top), p = exp2(x);
    store(s + i, p);
    sum0 = add(sum0, p);
    if (STATS) weighted0 = fma(p, x, weighted0);
    if (DISTANCE) far = fma(p, gap(i), far);
  }
  row.sum = row.sum * alpha + hsum(add(sum0, sum1));
  if (STATS) row.weighted += hsum(add(weighted0, weighted1));
  if (DISTANCE) row.distance = row.distance * alpha + hsum(far);
  return alpha;
}
