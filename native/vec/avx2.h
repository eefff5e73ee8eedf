// The vector vocabulary for x86-64-v3.
#pragma once

#include <immintrin.h>

#include "../generic/compiler.h"

namespace headwise { namespace avx2 {

using F = __m256;
constexpr int W = 8;
constexpr int MR = 6;
constexpr int NV = 2;
constexpr int DV = 2;
struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

HEADWISE_INLINE __m256i first(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
HEADWISE_INLINE __m128i first_halves(const void* p, int n) {
  uint16_t lanes[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  for (int i = 0; i < n; ++i) lanes[i] = ((const uint16_t*)p)[i];
  return _mm_loadu_si128((const __m128i*)lanes);
}
HEADWISE_INLINE F from_bf16(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }

HEADWISE_INLINE F set1(float x) { return _mm256_set1_ps(x); }
HEADWISE_INLINE F load(const float* p) { return _mm256_loadu_ps(p); }
HEADWISE_INLINE F load(const bf16* p) { return from_bf16(_mm_loadu_si128((const __m128i*)p)); }
HEADWISE_INLINE F load(const f16* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
HEADWISE_INLINE F load_first(const float* p, int n) { return _mm256_maskload_ps(p, first(n)); }
HEADWISE_INLINE F load_first(const bf16* p, int n) { return from_bf16(first_halves(p, n)); }
HEADWISE_INLINE F load_first(const f16* p, int n) { return _mm256_cvtph_ps(first_halves(p, n)); }
HEADWISE_INLINE void store(float* p, F x) { _mm256_storeu_ps(p, x); }
HEADWISE_INLINE void store_first(float* p, F x, int n) {
  if (n == W) store(p, x);
  else _mm256_maskstore_ps(p, first(n), x);
}
HEADWISE_INLINE void store_halves(void* p, __m128i x, int n) {
  if (n == 8) {
    _mm_storeu_si128((__m128i*)p, x);
    return;
  }
  uint16_t lanes[8];
  _mm_storeu_si128((__m128i*)lanes, x);
  for (int i = 0; i < n; ++i) ((uint16_t*)p)[i] = lanes[i];
}
HEADWISE_INLINE void store_first(f16* p, F x, int n) {
  store_halves(p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), n);
}
HEADWISE_INLINE void store_first(bf16* p, F x, int n) {  // round to nearest even; NaN stays NaN
  __m256i bits = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  up = _mm256_srli_epi32(_mm256_blendv_epi8(up, _mm256_set1_epi32(0x7fc00000), nan), 16);
  store_halves(p, _mm_packus_epi32(_mm256_castsi256_si128(up), _mm256_extracti128_si256(up, 1)), n);
}
HEADWISE_INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
HEADWISE_INLINE F sub(F a, F b) { return _mm256_sub_ps(a, b); }
HEADWISE_INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
HEADWISE_INLINE F div(F a, F b) { return _mm256_div_ps(a, b); }
HEADWISE_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
HEADWISE_INLINE F max(F a, F b) { return _mm256_max_ps(a, b); }  // b where either is NaN
HEADWISE_INLINE F abs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
HEADWISE_INLINE F iota() { return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7); }
HEADWISE_INLINE float hmax(F a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
HEADWISE_INLINE float hsum(F a) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
// Lanes whose bit is 0 take b.
HEADWISE_INLINE F select(uint32_t bits, F a, F b) {
  const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  __m256i on = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)bits), each), each);
  return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(on));
}
HEADWISE_INLINE uint32_t equal_bits(F a, F b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)); }
HEADWISE_INLINE uint32_t above_bits(F a, F b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_NLE_UQ)); }
HEADWISE_INLINE uint32_t finite_bits(F a) {
  return _mm256_movemask_ps(_mm256_cmp_ps(abs(a), _mm256_set1_ps(3.4028235e38f), _CMP_LE_OQ));
}
// The non-zero bytes among the 32 at p.
HEADWISE_INLINE uint32_t byte_bits(const uint8_t* p) {
  __m256i bytes = _mm256_loadu_si256((const __m256i*)p);
  return ~(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(bytes, _mm256_setzero_si256()));
}
// 2^x for x <= 127; below -126 it is 0, NaN gives NaN, a whole number is exact.
HEADWISE_INLINE F exp2(F x) {
  x = _mm256_max_ps(_mm256_set1_ps(-127.0f), x);
  F n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  F r = sub(x, n);
  F p = set1(0.0013264727205638408f);
  p = fma(p, r, set1(0.009671512639515082f));
  p = fma(p, r, set1(0.055507337432286405f));
  p = fma(p, r, set1(0.24022242085377774f));
  p = fma(p, r, set1(0.6931469775991742f));
  p = fma(p, r, set1(1.0f));
  __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return mul(p, _mm256_castsi256_ps(power));
}
HEADWISE_INLINE void transpose(F (&r)[8]) {
  F t[8];
  HEADWISE_UNROLL
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  HEADWISE_UNROLL
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  HEADWISE_UNROLL
  for (int c = 0; c < 4; ++c) {
    t[c] = _mm256_permute2f128_ps(r[c], r[4 + c], 0x20);
    t[4 + c] = _mm256_permute2f128_ps(r[c], r[4 + c], 0x31);
  }
  HEADWISE_UNROLL
  for (int c = 0; c < 8; ++c) r[c] = t[c];
}
// Lane i: the sum of the lanes of x[i].
HEADWISE_INLINE F sum_each(const F* x) {
  const F a = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
  const F b = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
  return add(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}
HEADWISE_INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }

}}  // namespace headwise::avx2
