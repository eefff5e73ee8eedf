// Threads. The team is the OpenMP runtime that the process already has, which torch keeps: its workers are warm,
// and a second pool would compete with them for the same cores. Where there is none, a small team of our own.
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "headwise.h"

#if !defined(_WIN32)
#include <dlfcn.h>
#endif

namespace headwise {

namespace {

// GNU's entry point, which LLVM's and Intel's runtimes offer too.
using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
// LLVM's own, where the GNU name is not exported (macOS).
using KmpcMicro = void (*)(int32_t*, int32_t*, ...);
using KmpcFork = void (*)(void*, int32_t, KmpcMicro, ...);
using KmpcPush = void (*)(void*, int32_t, int32_t);
using KmpcThread = int32_t (*)(void*);

struct Runtime {
  GompParallel gomp = nullptr;
  KmpcFork fork = nullptr;
  KmpcPush push = nullptr;
  KmpcThread thread = nullptr;
};

Runtime find_runtime() {
  Runtime found;
#if !defined(_WIN32)
  const char* forced = std::getenv("HEADWISE_THREADS");
  if (forced && forced[0] == 's') return found;  // "std"
  found.gomp = reinterpret_cast<GompParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  found.fork = reinterpret_cast<KmpcFork>(dlsym(RTLD_DEFAULT, "__kmpc_fork_call"));
  found.push = reinterpret_cast<KmpcPush>(dlsym(RTLD_DEFAULT, "__kmpc_push_num_threads"));
  found.thread = reinterpret_cast<KmpcThread>(dlsym(RTLD_DEFAULT, "__kmpc_global_thread_num"));
  if (!found.push || !found.thread) found.fork = nullptr;
#endif
  return found;
}

const Runtime& runtime() {
  static const Runtime found = find_runtime();
  return found;
}

struct Job {
  void (*body)(void*);
  void* context;
};

void kmpc_entry(int32_t*, int32_t*, Job* job) { job->body(job->context); }

struct Scratch {
  std::unique_ptr<char[]> block;
  size_t size = 0;
};

}  // namespace

const char* team_kind() { return runtime().gomp ? "GOMP_parallel" : runtime().fork ? "__kmpc_fork_call" : "std::thread"; }

void run_team(int threads, void (*body)(void*), void* context) {
  if (threads <= 1) {
    body(context);
    return;
  }
  const Runtime& found = runtime();
  if (found.gomp) {
    found.gomp(body, context, static_cast<unsigned>(threads), 0);
    return;
  }
  if (found.fork) {
    // ident_t of LLVM's runtime: reserved, flags (KMP_IDENT_KMPC), reserved, reserved, source.
    struct { int32_t a, flags, b, c; const char* source; } ident = {0, 2, 0, 0, ";headwise;run_team;0;0;;"};
    Job job = {body, context};
    found.push(&ident, found.thread(&ident), threads);
    found.fork(&ident, 1, reinterpret_cast<KmpcMicro>(kmpc_entry), &job);
    return;
  }
  std::vector<std::thread> team;
  for (int i = 1; i < threads; ++i) team.emplace_back(body, context);
  body(context);
  for (std::thread& member : team) member.join();
}

char* thread_scratch(size_t bytes) {
  thread_local Scratch mine;
  if (mine.size < bytes + 64) {
    mine.block.reset();
    mine.size = 0;
    mine.block.reset(new char[bytes + 64]);
    mine.size = bytes + 64;
  }
  const uintptr_t at = reinterpret_cast<uintptr_t>(mine.block.get());
  return mine.block.get() + ((at + 63) / 64 * 64 - at);
}

}  // namespace headwise
