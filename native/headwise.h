// The one interface between the bindings, the planner and the kernels of each target.
//
// Plain data only: this header is compiled with different instruction sets, so it holds no inline
// function that the linker could merge across them.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace headwise {

enum class Type : int32_t { f32 = 0, bf16 = 1, f16 = 2 };

// A (batch, head, row, width) array whose last axis is contiguous; strides count elements.
struct Array {
  const void* data;
  int64_t batch, head, row;
};

// A (batch, head, query, key) array; a stride of 0 broadcasts that axis; the stride of keys is 1 or 0.
struct Plane {
  const void* data;  // null: absent
  int64_t batch, head, query, key;
};

// One attention computation. Every pointer outlives the call; nothing in it is written but the outputs.
struct Call {
  Type type;  // of q, k, v and z
  int64_t B, H, G, Q, K, Dk, Dv;
  Array q, k, v;
  void* z;  // written with z_stride
  Array z_stride;
  const int32_t* kv_map;  // (H) the key-value head of each query head

  float scale, softcap;  // softcap 0: none
  bool causal;
  int64_t window;  // 0: none
  int64_t offset;  // position of query row 0, counted in keys
  const uint8_t* padding;  // (B, K) 1 = a real key, or null
  int64_t padding_batch;   // its stride
  Plane mask;              // uint8, 1 = may attend
  Plane bias[2];           // added to the score; at or below the lowest value of its type it hides the key
  Type bias_type[2];
  const float* distance_bias;  // (H or 1, distance_length), added at [j - i + distance_zero], or null
  int64_t distance_bias_head, distance_length, distance_zero;
  const float* sinks;  // (H) or null

  bool statistics;  // lse, entropy, max_weight, argmax, visible: each (B, H, Q)
  float *lse, *entropy, *max_weight;
  int64_t *argmax, *visible;
  float* sink;      // (B, H, Q) or null
  float* distance;  // (B, H, Q) mean attended distance, or null
  float* top;       // (B, H, Q) largest score in units of log 2, or null

  const int64_t* pair_rows;  // (B * Q + 1) offsets into pair_keys, or null
  const int64_t* pair_keys;  // key of each pair; out of range: weight 0
  float* pair_weights;       // (H, pairs)
  const uint8_t* classes;    // (B or 1, K) class of each key, or null
  int64_t classes_batch, n_classes;
  float* class_weights;  // (B, H, Q, n_classes)

  const float* row_weights;   // column sums only: (B or 1, Q) or null for 1
  int64_t row_weights_batch;
  float* received;            // column sums only: (B, H, K)
};

// How a call is cut into items. An item is the rows [first, first + rows) of every query head that
// shares one key-value head, against one of `splits` ranges of keys.
struct Plan {
  const int32_t* heads;        // (H) query heads sorted by key-value head
  const int32_t* group_start;  // (G + 1) offsets into heads
  int64_t block_queries;       // query positions of an item
  int64_t blocks, splits, split_keys, items;
  int64_t key_block;  // keys held in cache at a time
  int64_t max_rows;   // rows of the largest item
  bool direct;        // few rows: dot products along K as it lies, no packing
  bool pack_v;
  int64_t partial_floats;  // of one row: state, output, classes
  float* partials;         // (batch x group x block, split, max_rows, partial_floats) when splits > 1
  int32_t* waiting;        // (batch x group x block) splits not yet done, counted down atomically
};

// Online-softmax state of one row; scores are in units of log 2.
struct Row {
  float max, sum, weighted, distance;  // weighted: sum of p * (score - max)
  int32_t argmax, visible;
  int32_t head;
  int32_t careful;  // 1: this is the second, careful look
  int64_t query;
  int64_t low, high;  // visible keys by position alone
};

// What one target offers.
struct Target {
  const char* name;
  int row_tile, panel;  // rows and keys of a register tile
  size_t (*scratch_bytes)(const Call&, const Plan&);
  void (*forward)(const Call&, const Plan&, char* scratch, int64_t item);
  size_t (*column_scratch_bytes)(const Call&, const Plan&);
  void (*columns)(const Call&, const Plan&, char* scratch, int64_t item);
};

constexpr float kHidden = -3.0e38f;  // the score of a key that a row may not see
constexpr float kLog2e = 1.4426950408889634f;
constexpr int64_t kPartialState = 8;  // floats of a partial row before its output

// finish.cpp: the row's statistics are written, and the factor for its output is returned.
float finish_row(const Call&, const Row&, int64_t batch);
// Column sums: what a row's weights over its keys sum to (less than 1 with a sink; 0 without a visible key).
float column_factor(const Call&, int64_t row, int64_t head);

// plan.cpp
void run_forward(const Call&, int threads, const Target&);
void run_columns(const Call&, int threads, const Target&);

// threads.cpp: runs body(context) on up to `threads` threads and returns when all are done.
void run_team(int threads, void (*body)(void*), void* context);
const char* team_kind();
char* thread_scratch(size_t bytes);  // 64-byte aligned, owned by the calling thread

// dispatch.cpp
int target_count();
const Target* target_at(int index);  // best first; only those this machine can run
const Target* find_target(const char* name);

}  // namespace headwise
