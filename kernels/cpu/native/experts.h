// Linear layers and experts: rows sorted by expert times each expert's packed weights.
#pragma once

#include "api.h"
#include "gemm.h"
#include "parallel.h"
#include "quantized.h"
#include "scratch.h"

namespace {

// Rows of one expert that are multiplied with a block while it is in the cache.
constexpr int64_t CHUNK_ROWS = 192;

// A run of rows of one expert; its work items, one a block, begin at `first_item`.
struct Run {
  int64_t expert, first, stop, first_item;
};

template <class Step>
Block block_of(Step, const PackedWeight& weight, int64_t expert, int64_t number) {
  constexpr int64_t BYTES = sizeof(typename Step::Element);
  const int64_t left = weight.rows - number * BLOCK;
  return {static_cast<const char*>(weight.data) +
              (expert * weight.rows + number * BLOCK) * weight.columns * BYTES,
          weight.columns * BYTES / 4, static_cast<int>(left < BLOCK ? left : BLOCK)};
}

// Calls finish(expert, block number, block width, first row, number of rows, sums) for all rows,
// those of expert e being `starts[e]` .. `starts[e + 1]`, and all blocks of its weights.
template <class Step, class Finish>
bool multiply_grouped(const Rows& rows, const int64_t* starts, const PackedWeight& weight,
                      int num_threads, Finish finish) {
  const int64_t num_blocks = (weight.rows + BLOCK - 1) / BLOCK;
  int64_t most_runs = 0;
  for (int64_t e = 0; e < weight.experts; e++)
    most_runs += (starts[e + 1] - starts[e] + CHUNK_ROWS - 1) / CHUNK_ROWS;
  static thread_local Scratch kept;
  Run* runs = kept.take<Run>(most_runs);
  if (most_runs && !runs) return false;
  int64_t num_runs = 0, num_items = 0;
  for (int64_t e = 0; e < weight.experts; e++)
    for (int64_t r = starts[e]; r < starts[e + 1]; r += CHUNK_ROWS) {
      int64_t stop = r + CHUNK_ROWS < starts[e + 1] ? r + CHUNK_ROWS : starts[e + 1];
      runs[num_runs++] = {e, r, stop, num_items};
      num_items += num_blocks;
    }
  for_each(num_items, num_threads, [&](int64_t item) {
    const Run& run = piece_at(runs, num_runs, &Run::first_item, item);
    const int64_t number = item - run.first_item;
    const auto block = block_of(Step{}, weight, run.expert, number);
    multiply_block<Step>(rows, run.first, run.stop, block,
                         [&](int64_t first, int count, const float* sums) {
                           finish(run.expert, number, block.width, first, count, sums);
                         });
  });
  return true;
}

template <class T>
inline void store_row(T* to, const float* sums, const T* bias, int width) {
  for (int j = 0; j < width; j += LANES) {
    int n = width - j < LANES ? width - j : LANES;
    Vec x = load(sums + j, n);
    if (bias) x = add(x, load(bias + j, n));
    store(to + j, x, n);
  }
}

// Row r of the product, plus its expert's bias, becomes row `scatter[r]` of `out`, or row r.
template <class Step, class T>
bool multiply_and_store(const Rows& rows, const int64_t* starts, const PackedWeight& weight,
                        const T* bias, const int64_t* scatter, T* out, int num_threads) {
  const int64_t width = weight.rows;
  return multiply_grouped<Step>(
      rows, starts, weight, num_threads,
      [=](int64_t expert, int64_t number, int columns, int64_t first, int count,
          const float* sums) {
        const int64_t column = number * BLOCK;
        for (int i = 0; i < count; i++) {
          const int64_t row = scatter ? scatter[first + i] : first + i;
          store_row(out + row * width + column, sums + i * BLOCK,
                    bias ? bias + expert * width + column : nullptr, columns);
        }
      });
}

inline Vec activated(Vec x, int activation) {
  return activation == MOE_SERVE_SILU ? silu(x) : gelu_tanh(x);
}

// act(gate) * up, gate and up being rounded as if they were stored. In each block half of the
// columns are gates, and then come the same columns' ups.
template <class Step, class T>
bool multiply_and_activate(const Rows& rows, const int64_t* starts, const PackedWeight& weight,
                           int activation, T* out, int num_threads) {
  const int64_t inner = weight.rows / 2;
  return multiply_grouped<Step>(
      rows, starts, weight, num_threads,
      [=](int64_t, int64_t number, int columns, int64_t first, int count, const float* sums) {
        const int half = columns / 2;
        for (int i = 0; i < count; i++, sums += BLOCK) {
          T* to = out + (first + i) * inner + number * (BLOCK / 2);
          for (int j = 0; j < half; j += LANES) {
            const int n = half - j < LANES ? half - j : LANES;
            Vec gate = rounded_to(load(sums + j, n), out);
            Vec up = rounded_to(load(sums + half + j, n), out);
            store(to + j, mul(activated(gate, activation), up), n);
          }
        }
      });
}

// Tiles need rows that lie one after the other.
template <class T>
bool in_order(Rows* rows, int64_t count, int64_t width, int num_threads) {
#if defined(MOE_SERVE_AMX)
  if (sizeof(T) == 2 && rows->index) {
    static thread_local Scratch kept;
    char* to = kept.take<char>(count * width * 2);
    if (count && !to) return false;
    const Rows from = *rows;
    for_each_run(count, 64, num_threads, [=](int64_t first, int64_t stop) {
      for (int64_t r = first; r < stop; r++)
        memcpy(to + r * width * 2, from.at(r), width * 2);
    });
    *rows = {to, width * 2, nullptr};
  }
#endif
  (void)rows, (void)count, (void)width, (void)num_threads;
  return true;
}

// Rows as the product takes them: `count` of them, which lie among `num_sources`.
template <class Step>
bool prepare(Step, Rows* rows, int64_t count, int64_t, const PackedWeight& weight,
             int num_threads) {
  return in_order<typename Step::Element>(rows, count, weight.columns, num_threads);
}

// Adds each token's slots one after the other, weighed, in fp32. A slot of weight 0 adds 0.
template <class T>
void combine(const T* slots, const float* weights, T* out, int64_t tokens, int64_t top_k,
             int64_t width, int num_threads) {
  constexpr int64_t PART = 512;
  const int64_t parts = (width + PART - 1) / PART;
  for_each(tokens * parts, num_threads, [=](int64_t item) {
    const int64_t t = item / parts, begin = item % parts * PART;
    const int64_t end = begin + PART < width ? begin + PART : width;
    for (int64_t d = begin; d < end; d += LANES) {
      const int n = end - d < LANES ? static_cast<int>(end - d) : LANES;
      Vec total = set1(0.0f);
      for (int64_t k = 0; k < top_k; k++) {
        const float weight = weights[t * top_k + k];
        Vec part = weight == 0.0f
                       ? set1(0.0f)
                       : mul(load(slots + (t * top_k + k) * width + d, n), set1(weight));
        total = k ? add(total, part) : part;
      }
      store(out + t * width + d, total, n);
    }
  });
}

// Pairs (token, slot) sorted by expert, stable: `order[r]` is the pair of row r, `token[r]` its
// token; `starts` [experts + 1]. Pairs whose expert is not here stand nowhere.
inline void sort_pairs(const MoeCall& call, int64_t* order, int64_t* token, int64_t* starts) {
  const int64_t experts = call.gate_up.experts, pairs = call.tokens * call.top_k;
  auto expert_of = [&](int64_t pair) -> int64_t {
    const int64_t id = call.ids[pair];
    return id < 0 ? -1 : call.index_of ? call.index_of[id] : id;
  };
  for (int64_t e = 0; e <= experts; e++) starts[e] = 0;
  for (int64_t pair = 0; pair < pairs; pair++) {
    const int64_t expert = expert_of(pair);
    if (expert >= 0) starts[expert + 1]++;
  }
  for (int64_t e = 0; e < experts; e++) starts[e + 1] += starts[e];
  for (int64_t pair = 0; pair < pairs; pair++) {
    const int64_t expert = expert_of(pair);
    if (expert < 0) continue;
    const int64_t row = starts[expert]++;
    order[row] = pair;
    token[row] = pair / call.top_k;
  }
  for (int64_t e = experts; e > 0; e--) starts[e] = starts[e - 1];
  starts[0] = 0;
}

template <class Step>
int run_moe(const MoeCall& call) {
  using T = typename Step::Element;
  const int64_t pairs = call.tokens * call.top_k;
  const int64_t hidden = call.gate_up.columns, inner = call.down.columns, width = call.down.rows;
  static thread_local Scratch kept_order, kept_starts, kept_acts, kept_slots;
  int64_t* order = kept_order.take<int64_t>(2 * pairs);
  int64_t* starts = kept_starts.take<int64_t>(call.gate_up.experts + 1);
  T* acts = kept_acts.take<T>(pairs * inner);
  T* slots = kept_slots.take<T>(pairs * width);
  if (!order || !starts || !acts || !slots) return MOE_SERVE_NO_MEMORY;
  sort_pairs(call, order, order + pairs, starts);
  const int64_t count = starts[call.gate_up.experts];
  Rows rows{static_cast<const char*>(call.x), hidden * static_cast<int64_t>(sizeof(T)),
            order + pairs};
  Rows act_rows{reinterpret_cast<char*>(acts), inner * static_cast<int64_t>(sizeof(T)), nullptr};
  if (!prepare(Step{}, &rows, count, call.tokens, call.gate_up, call.threads) ||
      !multiply_and_activate<Step>(rows, starts, call.gate_up, call.activation, acts,
                                   call.threads) ||
      !prepare(Step{}, &act_rows, count, count, call.down, call.threads) ||
      !multiply_and_store<Step, T>(act_rows, starts, call.down, nullptr, order, slots,
                                   call.threads))
    return MOE_SERVE_NO_MEMORY;
  combine(slots, call.weights, static_cast<T*>(call.out), call.tokens, call.top_k, width,
          call.threads);
  return MOE_SERVE_DONE;
}

template <class Step>
int run_grouped(const GroupedCall& call) {
  using T = typename Step::Element;
  const int64_t experts = call.weight.experts;
  static thread_local Scratch kept;
  int64_t* starts = kept.take<int64_t>(experts + 1);
  if (!starts) return MOE_SERVE_NO_MEMORY;
  starts[0] = 0;
  for (int64_t e = 0; e < experts; e++)
    starts[e + 1] = starts[e] + (call.counts ? call.counts[e] : call.rows);
  Rows rows{static_cast<const char*>(call.x),
            call.row_stride * static_cast<int64_t>(sizeof(T)), nullptr};
  if (!prepare(Step{}, &rows, starts[experts], starts[experts], call.weight, call.threads))
    return MOE_SERVE_NO_MEMORY;
  bool done = call.activation == MOE_SERVE_NO_ACTIVATION
                  ? multiply_and_store<Step, T>(rows, starts, call.weight,
                                                static_cast<const T*>(call.bias), call.scatter,
                                                static_cast<T*>(call.out), call.threads)
                  : multiply_and_activate<Step>(rows, starts, call.weight, call.activation,
                                                static_cast<T*>(call.out), call.threads);
  return done ? MOE_SERVE_DONE : MOE_SERVE_NO_MEMORY;
}

}  // namespace
