// The vector vocabulary for AArch64.
#pragma once

#include <arm_neon.h>

#include "../generic/compiler.h"

namespace headwise { namespace neon {

using F = float32x4_t;
constexpr int W = 4;
constexpr int MR = 8;
constexpr int NV = 2;
constexpr int DV = 4;
struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

HEADWISE_INLINE F from_bf16(uint16x4_t x) { return vreinterpretq_f32_u32(vshll_n_u16(x, 16)); }
HEADWISE_INLINE F from_f16(uint16x4_t x) { return vcvt_f32_f16(vreinterpret_f16_u16(x)); }
HEADWISE_INLINE uint16x4_t first_halves(const void* p, int n) {
  uint16_t lanes[4] = {0, 0, 0, 0};
  for (int i = 0; i < n; ++i) lanes[i] = ((const uint16_t*)p)[i];
  return vld1_u16(lanes);
}

HEADWISE_INLINE F set1(float x) { return vdupq_n_f32(x); }
HEADWISE_INLINE F load(const float* p) { return vld1q_f32(p); }
HEADWISE_INLINE F load(const bf16* p) { return from_bf16(vld1_u16((const uint16_t*)p)); }
HEADWISE_INLINE F load(const f16* p) { return from_f16(vld1_u16((const uint16_t*)p)); }
HEADWISE_INLINE F load_first(const float* p, int n) {
  float lanes[4] = {0, 0, 0, 0};
  for (int i = 0; i < n; ++i) lanes[i] = p[i];
  return vld1q_f32(lanes);
}
HEADWISE_INLINE F load_first(const bf16* p, int n) { return from_bf16(first_halves(p, n)); }
HEADWISE_INLINE F load_first(const f16* p, int n) { return from_f16(first_halves(p, n)); }
HEADWISE_INLINE void store(float* p, F x) { vst1q_f32(p, x); }
HEADWISE_INLINE void store_first(float* p, F x, int n) {
  float lanes[4];
  vst1q_f32(lanes, x);
  for (int i = 0; i < n; ++i) p[i] = lanes[i];
}
HEADWISE_INLINE void store_halves(void* p, uint16x4_t x, int n) {
  uint16_t lanes[4];
  vst1_u16(lanes, x);
  for (int i = 0; i < n; ++i) ((uint16_t*)p)[i] = lanes[i];
}
HEADWISE_INLINE void store_first(f16* p, F x, int n) { store_halves(p, vreinterpret_u16_f16(vcvt_f16_f32(x)), n); }
HEADWISE_INLINE void store_first(bf16* p, F x, int n) {  // round to nearest even; NaN stays NaN
  uint32x4_t bits = vreinterpretq_u32_f32(x);
  uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  uint32x4_t up = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  up = vbslq_u32(vceqq_f32(x, x), up, vdupq_n_u32(0x7fc00000));
  store_halves(p, vshrn_n_u32(up, 16), n);
}
HEADWISE_INLINE F add(F a, F b) { return vaddq_f32(a, b); }
HEADWISE_INLINE F sub(F a, F b) { return vsubq_f32(a, b); }
HEADWISE_INLINE F mul(F a, F b) { return vmulq_f32(a, b); }
HEADWISE_INLINE F div(F a, F b) { return vdivq_f32(a, b); }
HEADWISE_INLINE F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
HEADWISE_INLINE F max(F a, F b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }  // b where either is NaN
HEADWISE_INLINE F abs(F a) { return vabsq_f32(a); }
HEADWISE_INLINE F iota() {
  static const float lanes[4] = {0, 1, 2, 3};
  return vld1q_f32(lanes);
}
HEADWISE_INLINE float hmax(F a) { return vmaxvq_f32(a); }
HEADWISE_INLINE float hsum(F a) { return vaddvq_f32(a); }
HEADWISE_INLINE uint32_t lane_bits(uint32x4_t on) {
  static const uint32_t each[4] = {1, 2, 4, 8};
  return vaddvq_u32(vandq_u32(on, vld1q_u32(each)));
}
// Lanes whose bit is 0 take b.
HEADWISE_INLINE F select(uint32_t bits, F a, F b) {
  static const uint32_t each[4] = {1, 2, 4, 8};
  return vbslq_f32(vtstq_u32(vdupq_n_u32(bits), vld1q_u32(each)), a, b);
}
HEADWISE_INLINE uint32_t equal_bits(F a, F b) { return lane_bits(vceqq_f32(a, b)); }
HEADWISE_INLINE uint32_t above_bits(F a, F b) { return lane_bits(vmvnq_u32(vcleq_f32(a, b))); }
HEADWISE_INLINE uint32_t finite_bits(F a) { return lane_bits(vcleq_f32(vabsq_f32(a), vdupq_n_f32(3.4028235e38f))); }
// The non-zero bytes among the 32 at p.
HEADWISE_INLINE uint32_t byte_bits(const uint8_t* p) {
  uint32_t bits = 0;
  for (int i = 0; i < 32; ++i) bits |= (uint32_t)(p[i] != 0) << i;
  return bits;
}
// 2^x for x <= 127; below -126 it is 0, NaN gives NaN, a whole number is exact.
HEADWISE_INLINE F exp2(F x) {
  x = max(set1(-127.0f), x);
  F n = vrndnq_f32(x), r = sub(x, n);
  F p = set1(0.0013264727205638408f);
  p = fma(p, r, set1(0.009671512639515082f));
  p = fma(p, r, set1(0.055507337432286405f));
  p = fma(p, r, set1(0.24022242085377774f));
  p = fma(p, r, set1(0.6931469775991742f));
  p = fma(p, r, set1(1.0f));
  int32x4_t power = vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23);
  return mul(p, vreinterpretq_f32_s32(power));
}
HEADWISE_INLINE void transpose(F (&r)[4]) {
  float32x4x2_t a = vtrnq_f32(r[0], r[1]), b = vtrnq_f32(r[2], r[3]);
  r[0] = vcombine_f32(vget_low_f32(a.val[0]), vget_low_f32(b.val[0]));
  r[1] = vcombine_f32(vget_low_f32(a.val[1]), vget_low_f32(b.val[1]));
  r[2] = vcombine_f32(vget_high_f32(a.val[0]), vget_high_f32(b.val[0]));
  r[3] = vcombine_f32(vget_high_f32(a.val[1]), vget_high_f32(b.val[1]));
}
// Lane i: the sum of the lanes of x[i].
HEADWISE_INLINE F sum_each(const F* x) { return vpaddq_f32(vpaddq_f32(x[0], x[1]), vpaddq_f32(x[2], x[3])); }
HEADWISE_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }

}}  // namespace headwise::neon
