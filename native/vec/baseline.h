// The vector vocabulary in plain C++: any processor. Four lanes, which compilers turn into SSE2 and its like.
#pragma once

#include "../generic/compiler.h"

namespace headwise { namespace baseline {

struct F { float v[4]; };
constexpr int W = 4;
constexpr int MR = 4;
constexpr int NV = 2;
constexpr int DV = 2;
struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

HEADWISE_INLINE float float_of(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}
HEADWISE_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}
HEADWISE_INLINE float widen(float x) { return x; }
HEADWISE_INLINE float widen(bf16 x) { return float_of((uint32_t)x.bits << 16); }
HEADWISE_INLINE float widen(f16 x) {
  const uint32_t sign = (uint32_t)(x.bits & 0x8000) << 16, exponent = x.bits >> 10 & 31, fraction = x.bits & 1023;
  if (exponent == 31) return float_of(sign | 0x7f800000u | fraction << 13);
  if (exponent) return float_of(sign | (exponent + 112) << 23 | fraction << 13);
  const float tiny = (float)fraction * 5.9604644775390625e-8f;
  return sign ? -tiny : tiny;
}
HEADWISE_INLINE void narrow(float* p, float x) { *p = x; }
HEADWISE_INLINE void narrow(bf16* p, float x) {  // round to nearest even; NaN stays NaN
  const uint32_t bits = bits_of(x);
  p->bits = x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
HEADWISE_INLINE void narrow(f16* p, float x) {
  const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (size > 0x7f800000) p->bits = (uint16_t)(sign | 0x7e00);
  else if (size >= 0x477ff000) p->bits = (uint16_t)(sign | 0x7c00);  // rounds to 65536 or beyond
  else if (size >= 0x38800000)
    p->bits = (uint16_t)(sign | (((size + 0xfff + (size >> 13 & 1)) >> 13) - (112 << 10)));
  else p->bits = (uint16_t)(sign | (bits_of(float_of(size) + 0.5f) - bits_of(0.5f)));  // adding 0.5 rounds to 2^-24
}

#define HEADWISE_LANES(expression)   \
  F out;                             \
  HEADWISE_UNROLL                    \
  for (int i = 0; i < 4; ++i) out.v[i] = (expression); \
  return out;
#define HEADWISE_BITS(condition)   \
  uint32_t bits = 0;               \
  for (int i = 0; i < 4; ++i) bits |= (uint32_t)(condition) << i; \
  return bits;

HEADWISE_INLINE F set1(float x) { HEADWISE_LANES(x) }
template <class T> HEADWISE_INLINE F load(const T* p) { HEADWISE_LANES(widen(p[i])) }
template <class T> HEADWISE_INLINE F load_first(const T* p, int n) { HEADWISE_LANES(i < n ? widen(p[i]) : 0.0f) }
HEADWISE_INLINE void store(float* p, F x) { __builtin_memcpy(p, x.v, 16); }
template <class T> HEADWISE_INLINE void store_first(T* p, F x, int n) {
  for (int i = 0; i < n; ++i) narrow(p + i, x.v[i]);
}
HEADWISE_INLINE F add(F a, F b) { HEADWISE_LANES(a.v[i] + b.v[i]) }
HEADWISE_INLINE F sub(F a, F b) { HEADWISE_LANES(a.v[i] - b.v[i]) }
HEADWISE_INLINE F mul(F a, F b) { HEADWISE_LANES(a.v[i] * b.v[i]) }
HEADWISE_INLINE F div(F a, F b) { HEADWISE_LANES(a.v[i] / b.v[i]) }
HEADWISE_INLINE F fma(F a, F b, F c) { HEADWISE_LANES(a.v[i] * b.v[i] + c.v[i]) }
HEADWISE_INLINE F max(F a, F b) { HEADWISE_LANES(a.v[i] > b.v[i] ? a.v[i] : b.v[i]) }  // b where either is NaN
HEADWISE_INLINE F abs(F a) { HEADWISE_LANES(float_of(bits_of(a.v[i]) & 0x7fffffff)) }
HEADWISE_INLINE F iota() { return F{{0, 1, 2, 3}}; }
HEADWISE_INLINE float hmax(F a) {
  const float x = a.v[0] > a.v[1] ? a.v[0] : a.v[1], y = a.v[2] > a.v[3] ? a.v[2] : a.v[3];
  return x > y ? x : y;
}
HEADWISE_INLINE float hsum(F a) { return (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]); }
// Lanes whose bit is 0 take b.
HEADWISE_INLINE F select(uint32_t bits, F a, F b) { HEADWISE_LANES(bits >> i & 1 ? a.v[i] : b.v[i]) }
HEADWISE_INLINE uint32_t equal_bits(F a, F b) { HEADWISE_BITS(a.v[i] == b.v[i]) }
HEADWISE_INLINE uint32_t above_bits(F a, F b) { HEADWISE_BITS(!(a.v[i] <= b.v[i])) }
HEADWISE_INLINE uint32_t finite_bits(F a) { HEADWISE_BITS((bits_of(a.v[i]) & 0x7f800000) != 0x7f800000) }
// The non-zero bytes among the 32 at p.
HEADWISE_INLINE uint32_t byte_bits(const uint8_t* p) {
  uint32_t bits = 0;
  for (int i = 0; i < 32; ++i) bits |= (uint32_t)(p[i] != 0) << i;
  return bits;
}
// 2^x for x <= 127; below -126 it is 0, NaN gives NaN, a whole number is exact.
HEADWISE_INLINE float exp2_lane(float x) {
  x = -127.0f > x ? -127.0f : x;
  const float shifted = x + 12582912.0f;  // 1.5 * 2^23: rounds to a whole number
  const float r = x - (shifted - 12582912.0f);
  float p = 0.0013264727205638408f;
  p = p * r + 0.009671512639515082f;
  p = p * r + 0.055507337432286405f;
  p = p * r + 0.24022242085377774f;
  p = p * r + 0.6931469775991742f;
  p = p * r + 1.0f;
  return p * float_of((bits_of(shifted) + 127) << 23);
}
HEADWISE_INLINE F exp2(F x) { HEADWISE_LANES(exp2_lane(x.v[i])) }
HEADWISE_INLINE void transpose(F (&r)[4]) {
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < i; ++j) {
      const float x = r[i].v[j];
      r[i].v[j] = r[j].v[i];
      r[j].v[i] = x;
    }
}
// Lane i: the sum of the lanes of x[i].
HEADWISE_INLINE F sum_each(const F* x) { return F{{hsum(x[0]), hsum(x[1]), hsum(x[2]), hsum(x[3])}}; }
HEADWISE_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }

#undef HEADWISE_LANES
#undef HEADWISE_BITS

}}  // namespace headwise::baseline
