// How a call is cut into items, and the loop that hands them to threads.
#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <vector>

#include "headwise.h"

namespace headwise {

namespace {

constexpr int64_t kDirectRows = 8;        // at most so many rows of a group: read keys as they lie
constexpr int64_t kBlockBytes = 1280 << 10;  // queries and outputs of an item
constexpr int64_t kMostRows = 1536, kLeastRows = 192;
constexpr double kSerialWork = 2e5;  // multiply-adds below which one thread is quicker

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

struct Groups {
  std::vector<int32_t> heads, start;
  int64_t largest = 1;
};

Groups group_heads(const Call& c) {
  Groups groups;
  groups.heads.reserve(c.H);
  groups.start.push_back(0);
  for (int64_t g = 0; g < c.G; ++g) {
    for (int64_t h = 0; h < c.H; ++h)
      if (c.kv_map[h] == g) groups.heads.push_back(static_cast<int32_t>(h));
    groups.start.push_back(static_cast<int32_t>(groups.heads.size()));
    groups.largest = std::max<int64_t>(groups.largest, groups.start[g + 1] - groups.start[g]);
  }
  return groups;
}

int64_t key_block_of(const Call& c, const Target& target) {
  int64_t block = 512;
  while (block > target.panel * 2 && block * std::max(c.Dk, c.Dv) > 512 * 256) block /= 2;
  return std::min(block, round_up(std::max<int64_t>(c.K, 1), target.panel));
}

// The keys that a row may see at most.
int64_t reach(const Call& c) {
  if (!c.window) return c.K;
  return std::min(c.K, c.causal ? c.window : 2 * c.window - 1);
}

void split_rows(const Call& c, Plan& plan, int64_t group, int threads) {
  const int64_t width = (c.Dk + c.Dv + 2 * 16 + c.n_classes) * 4;
  int64_t rows = std::clamp<int64_t>(kBlockBytes / width, 48, kMostRows);
  // A narrow window: the block is not much longer than what it sees, or most of what is packed is seen by few rows.
  if (c.window) rows = std::min(rows, std::max<int64_t>(kLeastRows, round_up(reach(c), 12)));
  const int64_t total = group * c.Q, units = c.B * c.G;
  int64_t blocks = ceil_div(total, rows);
  // Enough items for the threads to end together, while packing keys stays a small part.
  const int64_t enough = ceil_div(static_cast<int64_t>(threads) * (c.causal ? 8 : 6), units);
  if (threads > 1) blocks = std::max(blocks, std::min(enough, std::max<int64_t>(1, total / kLeastRows)));
  plan.block_queries = std::max<int64_t>(1, ceil_div(c.Q, std::max<int64_t>(blocks, 1)));
  if (plan.block_queries * group > rows) plan.block_queries = std::max<int64_t>(1, rows / group);
  plan.block_queries = std::min(plan.block_queries, std::max<int64_t>(c.Q, 1));
  if (plan.block_queries > 12 && group == 1) plan.block_queries = round_up(plan.block_queries, 12);
  plan.blocks = ceil_div(c.Q, plan.block_queries);
  plan.max_rows = plan.block_queries * group;
}

void split_keys(const Call& c, Plan& plan, int threads) {
  const int64_t units = c.B * c.G * plan.blocks;
  plan.splits = 1;
  plan.split_keys = round_up(std::max<int64_t>(c.K, 1), plan.key_block);
  if (threads <= 1 || units >= 4 * threads || plan.max_rows >= 2 * kLeastRows) return;
  const int64_t wanted = ceil_div(4 * threads, std::max<int64_t>(units, 1));
  const int64_t size = round_up(ceil_div(c.K, wanted), plan.key_block);
  plan.split_keys = std::max(size, plan.key_block);
  plan.splits = std::max<int64_t>(1, ceil_div(c.K, plan.split_keys));
}

struct Job {
  const Call& call;
  const Plan& plan;
  const Target& target;
  bool columns;
  size_t scratch;
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
};

void work(void* context) {
  Job& job = *static_cast<Job*>(context);
  int64_t item = job.next.fetch_add(1, std::memory_order_relaxed);
  if (item >= job.plan.items) return;
  char* scratch = nullptr;
  try {
    scratch = thread_scratch(job.scratch);
  } catch (const std::bad_alloc&) {
    job.failed = true;
    return;
  }
  for (; item < job.plan.items; item = job.next.fetch_add(1, std::memory_order_relaxed)) {
    if (job.columns) job.target.columns(job.call, job.plan, scratch, item);
    else job.target.forward(job.call, job.plan, scratch, item);
  }
}

void run(Job& job, int threads) {
  run_team(static_cast<int>(std::min<int64_t>(threads, job.plan.items)), work, &job);
  if (job.failed) throw std::bad_alloc();
}

}  // namespace

void run_forward(const Call& c, int threads, const Target& target) {
  if (c.B * c.H * c.Q == 0) return;
  const double macs = static_cast<double>(c.B * c.H * c.Q) * static_cast<double>(reach(c)) * (c.Dk + c.Dv);
  if (macs < kSerialWork) threads = 1;
  const Groups groups = group_heads(c);
  Plan plan = {};
  plan.heads = groups.heads.data();
  plan.group_start = groups.start.data();
  plan.key_block = key_block_of(c, target);
  plan.direct = groups.largest * c.Q <= kDirectRows;
  split_rows(c, plan, groups.largest, threads);
  split_keys(c, plan, threads);
  plan.pack_v = !plan.direct && (c.type != Type::f32 || c.padding || c.Dv % 16 != 0);
  plan.items = c.B * c.G * plan.blocks * plan.splits;
  std::unique_ptr<float[]> partials;
  std::vector<int32_t> waiting;
  if (plan.splits > 1) {
    const int64_t slots = c.B * c.G * plan.blocks;
    plan.partial_floats = kPartialState + round_up(c.Dv, 16) + round_up(c.n_classes, 16);
    partials.reset(new float[slots * plan.splits * plan.max_rows * plan.partial_floats]);
    waiting.assign(slots, static_cast<int32_t>(plan.splits));
    plan.partials = partials.get();
    plan.waiting = waiting.data();
  }
  Job job{c, plan, target, false, target.scratch_bytes(c, plan)};
  run(job, threads);
}

void run_columns(const Call& c, int threads, const Target& target) {
  if (c.B * c.H * c.K == 0) return;
  const Groups groups = group_heads(c);
  Plan plan = {};
  plan.heads = groups.heads.data();
  plan.group_start = groups.start.data();
  plan.key_block = key_block_of(c, target);
  plan.blocks = ceil_div(c.K, plan.key_block);
  plan.splits = 1;
  plan.items = c.B * c.G * plan.blocks;
  const double macs = static_cast<double>(c.B * c.H * c.Q) * static_cast<double>(reach(c)) * c.Dk;
  if (macs < kSerialWork) threads = 1;
  Job job{c, plan, target, true, target.column_scratch_bytes(c, plan)};
  run(job, threads);
}

}  // namespace headwise
