// What differs between compilers.
#pragma once

#include <stdint.h>

#if defined(_MSC_VER) && !defined(__clang__)
#error "the kernel is built with GCC or Clang (on Windows: the ClangCL toolset)"
#endif

#define HEADWISE_INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define HEADWISE_UNROLL _Pragma("clang loop unroll(full)")
#else
#define HEADWISE_UNROLL _Pragma("GCC unroll 16")
#endif
