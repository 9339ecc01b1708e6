// What Python calls: plain structures, filled by kernels/cpu/calls.py field by field.
#pragma once

#include <stdint.h>

enum { MOE_SERVE_DONE = 0, MOE_SERVE_NO_MEMORY = 1 };
enum { MOE_SERVE_FLOAT32 = 0, MOE_SERVE_BFLOAT16 = 1 };
enum { MOE_SERVE_NO_ACTIVATION = 0, MOE_SERVE_SILU = 1, MOE_SERVE_GELU_TANH = 2 };

// [experts, rows, columns], packed as gemm.h says, or where `bits` is 8 or 4 as quantized.h does.
struct PackedWeight {
  const void* data;
  int64_t experts, rows, columns;
  int32_t bits, group;
};

// Matrices [rows, columns] of `dtype`, one after the other, into zeroed memory; see quantize.h.
struct QuantizeCall {
  const void* from;
  void* to;
  int64_t matrices, rows, columns;
  int32_t dtype, bits, group, is_paired, threads;
};

// The routed experts of a layer: `out` [tokens, down.rows] from `x` [tokens, gate_up.columns].
struct MoeCall {
  const void* x;
  const int64_t* ids;     // [tokens, top_k]; -1: none
  const float* weights;   // [tokens, top_k]
  const int64_t* index_of;  // an id's expert in the weights, or null: they are the same
  PackedWeight gate_up, down;
  void* out;
  int64_t tokens, top_k;
  int32_t dtype, activation, threads;
};

// Rows sorted by expert; without `counts` [experts] all `rows` are of the only one.
struct GroupedCall {
  const void* x;
  int64_t row_stride;  // elements
  const int64_t* counts;
  int64_t rows;
  PackedWeight weight;
  const void* bias;        // [experts, rows of the weight], or null
  const int64_t* scatter;  // see multiply_and_store; null: in order
  void* out;
  int32_t dtype, activation, threads;
};

// `out` = rms_norm(x) of rows that lie `x_stride` elements apart; with `y`, `total` = x + y first.
struct NormCall {
  const void *x, *y, *weight;
  void *total, *out;
  int64_t rows, width, x_stride, y_stride;
  float eps;
  int32_t dtype, threads;
};

// Per-head norms (null: none), rotation in halves, and the store into the pool.
struct AttentionInputsCall {
  const void *q, *k, *v, *cos, *sin, *q_weight, *k_weight;
  const int64_t* slots;
  void *out, *keys, *values;
  int64_t tokens, q_stride, k_stride, v_stride;  // strides between tokens, in elements
  int64_t heads, kv_heads, head_dim, rotary_dim;
  float eps;
  int32_t dtype, threads;
};

// Top-k of fp32 scores; see kernels/topk_router.py for each field.
struct RouterCall {
  const float *logits, *bias;
  int64_t* ids;
  float* weights;
  int64_t* load;
  const int32_t *phases, *num_valid;
  int64_t tokens, experts, top_k, groups, top_groups;
  float scale;
  int32_t is_sigmoid, renormalize, threads;
};

// Causal attention of the step's tokens [tokens, heads, head_dim] over a pool of keys and values
// [blocks, block_size, kv_heads, head_dim]; the step's own are in it.
struct AttentionCall {
  const void *q, *keys, *values;
  const int64_t* tables;  // [sequences, ...], rows `table_stride` apart: blocks in order
  const int64_t *query_starts, *context_lens;  // of the sequences, as in moe_serve/context.py
  void* out;
  int64_t sequences, table_stride, block_size, q_stride;  // strides in elements
  int64_t heads, kv_heads, head_dim, window;
  float scale, value_scale;
  int32_t dtype, threads;
};

// Memory to read, or `rounds` of multiplications on each thread.
struct LimitCall {
  const void* data;
  int64_t bytes, rounds;
  int32_t dtype, threads;
};

// The functions of one instruction set.
struct Kernels {
  int (*quantize)(const QuantizeCall*);
  int (*moe)(const MoeCall*);
  int (*grouped)(const GroupedCall*);
  int (*norm)(const NormCall*);
  int (*attention_inputs)(const AttentionInputsCall*);
  int (*router)(const RouterCall*);
  int (*attention)(const AttentionCall*);
  float (*read)(const LimitCall*);
  double (*peak)(const LimitCall*);
};
