// The vector vocabulary for x86-64-v4.
#pragma once

#include <immintrin.h>
#include "../generic/compiler.h"

namespace headwise { namespace avx512 {

using F = __m512;
constexpr int W = 16;   // lanes
constexpr int MR = 12;  // rows of a register tile
constexpr int NV = 2;   // vectors of a panel
constexpr int DV = 4;   // vectors of an output tile with few rows
struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };


HEADWISE_INLINE __mmask16 first(int n) { return (__mmask16)((1u << n) - 1u); }
HEADWISE_INLINE F set1(float x) { return _mm512_set1_ps(x); }
HEADWISE_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
HEADWISE_INLINE F load(const bf16* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
HEADWISE_INLINE F load(const f16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
HEADWISE_INLINE F load_first(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
HEADWISE_INLINE F load_first(const bf16* p, int n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(n), p)), 16));
}
HEADWISE_INLINE F load_first(const f16* p, int n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p)); }
HEADWISE_INLINE void store(float* p, F x) { _mm512_storeu_ps(p, x); }
HEADWISE_INLINE void store_first(float* p, F x, int n) {
  if (n == W) store(p, x);
  else _mm512_mask_storeu_ps(p, first(n), x);
}
HEADWISE_INLINE void store_first(f16* p, F x, int n) {
  _mm256_mask_storeu_epi16(p, first(n), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
HEADWISE_INLINE void store_first(bf16* p, F x, int n) {  // round to nearest even; NaN stays NaN
  __m512i bits = _mm512_castps_si512(x);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  up = _mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
  _mm256_mask_storeu_epi16(p, first(n), _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16)));
}
HEADWISE_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
HEADWISE_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
HEADWISE_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
HEADWISE_INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
HEADWISE_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
HEADWISE_INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }  // b where either is NaN
HEADWISE_INLINE F abs(F a) { return _mm512_abs_ps(a); }
HEADWISE_INLINE F iota() {
  return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
HEADWISE_INLINE float hmax(F a) { return _mm512_reduce_max_ps(a); }
HEADWISE_INLINE float hsum(F a) { return _mm512_reduce_add_ps(a); }
// Lanes whose bit is 0 take b.
HEADWISE_INLINE F select(uint32_t bits, F a, F b) { return _mm512_mask_blend_ps((__mmask16)bits, b, a); }
HEADWISE_INLINE uint32_t equal_bits(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
HEADWISE_INLINE uint32_t above_bits(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLE_UQ); }  // true for NaN
HEADWISE_INLINE uint32_t finite_bits(F a) {
  return _mm512_cmp_ps_mask(_mm512_abs_ps(a), _mm512_set1_ps(3.4028235e38f), _CMP_LE_OQ);
}
// The non-zero bytes among the 32 at p.
HEADWISE_INLINE uint32_t byte_bits(const uint8_t* p) {
  __m256i bytes = _mm256_loadu_si256((const __m256i*)p);
  return _mm256_test_epi8_mask(bytes, bytes);
}
// 2^x for x <= 0 or moderate; -inf gives 0, NaN gives NaN, a whole number is exact.
HEADWISE_INLINE F exp2(F x) {
  F r = _mm512_reduce_ps(x, 0x09);  // x - floor(x)
  F p = set1(0.0018671300694417764f);
  p = fma(p, r, set1(0.009017030323417477f));
  p = fma(p, r, set1(0.05579991310301708f));
  p = fma(p, r, set1(0.2401644501552591f));
  p = fma(p, r, set1(0.69315131180461f));
  p = fma(p, r, set1(1.0f));
  return _mm512_scalef_ps(p, x);
}
HEADWISE_INLINE void transpose(F (&r)[16]) {
  F t[16];
HEADWISE_UNROLL
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
HEADWISE_UNROLL
  for (int i = 0; i < 16; i += 4) {
    __m512d a = _mm512_castps_pd(t[i]), b = _mm512_castps_pd(t[i + 1]);
    __m512d c = _mm512_castps_pd(t[i + 2]), d = _mm512_castps_pd(t[i + 3]);
    r[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
    r[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
    r[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
    r[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
  }
HEADWISE_UNROLL
  for (int c = 0; c < 4; ++c) {
    t[c] = _mm512_shuffle_f32x4(r[c], r[4 + c], 0x88);
    t[4 + c] = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0x88);
    t[8 + c] = _mm512_shuffle_f32x4(r[c], r[4 + c], 0xdd);
    t[12 + c] = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0xdd);
  }
HEADWISE_UNROLL
  for (int c = 0; c < 4; ++c) {
    r[c] = _mm512_shuffle_f32x4(t[c], t[4 + c], 0x88);
    r[8 + c] = _mm512_shuffle_f32x4(t[c], t[4 + c], 0xdd);
    r[4 + c] = _mm512_shuffle_f32x4(t[8 + c], t[12 + c], 0x88);
    r[12 + c] = _mm512_shuffle_f32x4(t[8 + c], t[12 + c], 0xdd);
  }
}
// Lane i: the sum of the lanes of x[i].
HEADWISE_INLINE F sum_each(const F* x) {
  F a[8], b[4];
HEADWISE_UNROLL
  for (int i = 0; i < 8; ++i)
    a[i] = add(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
HEADWISE_UNROLL
  for (int i = 0; i < 4; ++i) {
    const __m512d low = _mm512_castps_pd(a[2 * i]), high = _mm512_castps_pd(a[2 * i + 1]);
    b[i] = add(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)), _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
  }
  const F c = add(_mm512_shuffle_f32x4(b[0], b[1], 0x88), _mm512_shuffle_f32x4(b[0], b[1], 0xdd));
  const F d = add(_mm512_shuffle_f32x4(b[2], b[3], 0x88), _mm512_shuffle_f32x4(b[2], b[3], 0xdd));
  return add(_mm512_shuffle_f32x4(c, d, 0x88), _mm512_shuffle_f32x4(c, d, 0xdd));
}
HEADWISE_INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }

}}  // namespace headwise::avx512
