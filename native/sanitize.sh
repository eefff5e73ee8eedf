#!/bin/sh
# The kernel's tests against a build with AddressSanitizer and UndefinedBehaviorSanitizer.
#
#     native/sanitize.sh [PYTHON] [PYTEST ARGUMENTS]
#
# Needs cmake, ninja, nanobind and GCC. The sanitized extension lies in a folder of its own and stands in for the
# installed one by HEADWISE_CORE.
set -eu
python=${1:-python3}
[ $# -gt 0 ] && shift
here=$(cd "$(dirname "$0")/.." && pwd)
build=${BUILD:-$here/build/sanitize}
${CMAKE:-cmake} -S "$here" -B "$build" -G Ninja -DPython_EXECUTABLE="$(command -v "$python")" -DCMAKE_BUILD_TYPE=RelWithDebInfo \
  -DHEADWISE_SANITIZE=ON >/dev/null
cmake --build "$build"
export HEADWISE_CORE="$(ls "$build"/_core*.so)"
export LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so) $(gcc -print-file-name=libstdc++.so.6)"
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
cd "$here"
exec "$python" -m pytest -q -p no:cacheprovider tests/kernels/test_quick.py tests/kernels/test_cpu_agreement.py tests/kernels/test_cpu_memory.py \
  -k "not scratch" "$@"
