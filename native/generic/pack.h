// Copies into the order that the register tiles read: queries scaled and turned, keys in panels, values as float.

// dst[d * lead + r] = scale * src[r * stride + d] for r < rows, 0 for rows <= r < W. Whole vectors are stored, so
// a lane past `lead` is overwritten by the next d; the destination has W floats to spare at its end.
template <class T>
static void turn(float* dst, int64_t lead, const T* const* src, int rows, int64_t width, float scale) {
  F t[W];
  const F factor = set1(scale);
  for (int64_t d = 0; d < width; d += W) {
    const int lanes = width - d < W ? (int)(width - d) : W;
    for (int r = 0; r < W; ++r) {
      if (r >= rows) t[r] = set1(0.0f);
      else t[r] = lanes == W ? load(src[r] + d) : load_first(src[r] + d, lanes);
    }
    transpose(t);
    if (lanes == W) {
HEADWISE_UNROLL
      for (int i = 0; i < W; ++i) store(dst + (d + i) * lead, mul(t[i], factor));
    } else {
      for (int i = 0; i < lanes; ++i) store(dst + (d + i) * lead, mul(t[i], factor));
    }
  }
}

// Keys [0, keys) as panels of NV * W keys: dst[panel][d][key]. In the last vector that holds a key, missing ones are 0.
template <class T>
static void pack_keys(float* dst, const T* k, int64_t stride, int64_t keys, int64_t width) {
  const T* src[W];
  for (int64_t start = 0; start < keys; start += NV * W, dst += NV * W * width) {
    for (int j = 0; j < NV && start + j * W < keys; ++j) {
      const int64_t at = start + j * W;
      const int rows = keys - at < W ? (int)(keys - at) : W;
      for (int r = 0; r < rows; ++r) src[r] = k + (at + r) * stride;
      turn(dst + j * W, NV * W, src, rows, width, 1.0f);
    }
  }
}

// One row as float, padded with zeros to whole vectors.
template <class T>
HEADWISE_INLINE void pack_row(float* dst, const T* src, int64_t width, float scale) {
  const F factor = set1(scale);
  int64_t d = 0;
  for (; d + W <= width; d += W) store(dst + d, mul(load(src + d), factor));
  if (d < width) store(dst + d, mul(load_first(src + d, (int)(width - d)), factor));
}

// Rows as float; a row whose bit of `real` is 0 becomes zeros, so that what lies in padding cannot spread.
template <class T>
static void pack_values(float* dst, int64_t ld, const T* v, int64_t stride, int64_t keys, int64_t width,
                        const uint32_t* real) {
  for (int64_t key = 0; key < keys; ++key, dst += ld) {
    if (real && !(real[key / (NV * W)] >> (key % (NV * W)) & 1)) {
      for (int64_t d = 0; d < ld; d += W) store(dst + d, set1(0.0f));
    } else {
      pack_row(dst, v + key * stride, width, 1.0f);
    }
  }
}
