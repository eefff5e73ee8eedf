// Which targets were built, and which of them this machine can run.
#include <cstring>

#include "headwise.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define HEADWISE_X86 1
#endif

namespace headwise {

#if defined(HEADWISE_X86)
extern const Target avx512_target, avx2_target;
#endif
#if defined(__aarch64__) || defined(_M_ARM64)
extern const Target neon_target;
#endif
extern const Target baseline_target;

namespace {

struct Targets {
  const Target* list[4];
  int count = 0;
  Targets() {
#if defined(HEADWISE_X86)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma"))
      list[count++] = &avx512_target;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi"))
      list[count++] = &avx2_target;
#endif
#if defined(__aarch64__) || defined(_M_ARM64)
    list[count++] = &neon_target;
#endif
    list[count++] = &baseline_target;
  }
};

const Targets& targets() {
  static const Targets all;
  return all;
}

}  // namespace

int target_count() { return targets().count; }

const Target* target_at(int index) { return targets().list[index]; }

const Target* find_target(const char* name) {
  for (int i = 0; i < target_count(); ++i)
    if (!std::strcmp(target_at(i)->name, name)) return target_at(i);
  return nullptr;
}

}  // namespace headwise
