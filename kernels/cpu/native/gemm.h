// Products of rows with blocks of packed weights.
//
// A weight [N, K] is packed in blocks of 64 of its rows, which are the product's columns; a block is
// contiguous, in the order in which it is read: for each step over K, the block's columns side by
// side. A step is one fp32, or two bf16 that stand together. The last block may be narrower.
//
// Each sum has one accumulator that goes through K from first to last, whatever the number of rows:
// a row's bits do not depend on its company.
#pragma once

#include "amx.h"
#include "blocks.h"
#include "simd.h"

namespace {

// `width` columns, `steps` over K, of which each takes `width * 4` bytes.
struct Block {
  const char* data;
  int64_t steps;
  int width;
};

// Row r is at `base + (index ? index[r] : r) * stride` bytes.
struct Rows {
  const char* base;
  int64_t stride;
  const int64_t* index;

  const char* at(int64_t r) const { return base + (index ? index[r] : r) * stride; }
};

#if defined(__AVX512F__)
constexpr int MOST_ROWS = 6;
constexpr int PANEL = 4;  // vectors of columns at once: 6 * 4 sums and 4 weights in 32 registers
#else
constexpr int MOST_ROWS = 4;
constexpr int PANEL = 2;
#endif

// How a step is multiplied: the weights of a vector of columns, and one number or pair of a row.
struct FloatStep {
  using Element = float;
  using Weights = Vec;
  using Value = Vec;
  static Weights weights(Ints x) {
    Vec y;
    memcpy(&y, &x, sizeof y);
    return y;
  }
  static Value value(const char* row, int64_t step) {
    return set1(reinterpret_cast<const float*>(row)[step]);
  }
  static Vec multiply(Vec sum, Weights w, Value x) { return fma(w, x, sum); }
};

#if defined(__AVX512BF16__)
struct PairStep {
  using Element = bf16;
  using Weights = __m512bh;
  using Value = __m512bh;
  static Weights weights(Ints x) { return reinterpret_cast<__m512bh>(x); }
  static Value value(const char* row, int64_t step) {
    return reinterpret_cast<__m512bh>(set1_int(reinterpret_cast<const uint32_t*>(row)[step]));
  }
  static Vec multiply(Vec sum, Weights w, Value x) { return _mm512_dpbf16_ps(sum, w, x); }
};
#else
struct PairStep {
  using Element = bf16;
  struct Weights {
    Vec first, second;
  };
  using Value = Weights;
  static Weights weights(Ints x) { return {first_of_pairs(x), second_of_pairs(x)}; }
  static Value value(const char* row, int64_t step) {
    return weights(set1_int(reinterpret_cast<const uint32_t*>(row)[step]));
  }
  static Vec multiply(Vec sum, Weights w, Value x) {
    return fma(w.second, x.second, fma(w.first, x.first, sum));
  }
};
#endif

// M rows by V vectors of columns; the last vector has `lanes` of them.
template <class Step, int M, int V, bool RAGGED>
inline void multiply_panel(const char* const* rows, const char* weights, int64_t steps,
                           int64_t step_bytes, int lanes, float* out) {
  Vec sums[M][V];
#pragma GCC unroll 8
  for (int i = 0; i < M; i++)
#pragma GCC unroll 8
    for (int j = 0; j < V; j++) sums[i][j] = set1(0.0f);
  for (int64_t step = 0; step < steps; step++, weights += step_bytes) {
    typename Step::Weights w[V];
#pragma GCC unroll 8
    for (int j = 0; j < V; j++) {
      const char* at = weights + j * LANES * 4;
      w[j] = Step::weights(RAGGED ? load_ints(at, lanes) : load_ints(at));
    }
#pragma GCC unroll 8
    for (int i = 0; i < M; i++) {
      auto x = Step::value(rows[i], step);
#pragma GCC unroll 8
      for (int j = 0; j < V; j++) sums[i][j] = Step::multiply(sums[i][j], w[j], x);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < M; i++)
#pragma GCC unroll 8
    for (int j = 0; j < V; j++) store(out + i * BLOCK + j * LANES, sums[i][j]);
}

template <class Step, int M>
void multiply_rows(const char* const* rows, const Block& block, float* out) {
  constexpr int COLUMNS = PANEL * LANES;
  const int64_t step_bytes = block.width * 4;
  int column = 0;
  for (; column + COLUMNS <= block.width; column += COLUMNS)
    multiply_panel<Step, M, PANEL, false>(rows, block.data + column * 4, block.steps, step_bytes,
                                          LANES, out + column);
  for (; column < block.width; column += LANES) {
    int lanes = block.width - column < LANES ? block.width - column : LANES;
    multiply_panel<Step, M, 1, true>(rows, block.data + column * 4, block.steps, step_bytes, lanes,
                                     out + column);
  }
}

// Up to MOST_ROWS rows times one block -> `out` [count, 64]; columns past the width hold anything.
template <class Step>
void multiply_few(const char* const* rows, int count, const Block& block, float* out) {
  switch (count) {
    case 1: return multiply_rows<Step, 1>(rows, block, out);
    case 2: return multiply_rows<Step, 2>(rows, block, out);
    case 3: return multiply_rows<Step, 3>(rows, block, out);
    case 4: return multiply_rows<Step, 4>(rows, block, out);
#if defined(__AVX512F__)
    case 5: return multiply_rows<Step, 5>(rows, block, out);
    case 6: return multiply_rows<Step, 6>(rows, block, out);
#endif
  }
}

// Rows `first` .. `stop` of `rows`, a few at a time: multiply(where they are, their number, sums
// [number, 64]), then finish(first row, number of rows, sums).
template <class Multiply, class Finish>
void multiply_in_turns(const Rows& rows, int64_t first, int64_t stop, Multiply multiply,
                       Finish finish) {
  alignas(64) float sums[MOST_ROWS * BLOCK];
  for (int64_t r = first; r < stop; r += MOST_ROWS) {
    const char* at[MOST_ROWS];
    int count = stop - r < MOST_ROWS ? static_cast<int>(stop - r) : MOST_ROWS;
    for (int i = 0; i < count; i++) at[i] = rows.at(r + i);
    multiply(at, count, sums);
    finish(r, count, sums);
  }
}

// Calls finish(first row, number of rows, sums [number, 64]) for rows `first` .. `stop` of `rows`
// times the block.
template <class Step, class Finish>
void multiply_block(const Rows& rows, int64_t first, int64_t stop, const Block& block,
                    Finish finish) {
#if defined(MOE_SERVE_AMX)
  if (sizeof(typename Step::Element) == 2)
    return multiply_tiles(rows, first, stop, block, finish);
#endif
  multiply_in_turns(
      rows, first, stop,
      [&](const char* const* at, int count, float* sums) {
        multiply_few<Step>(at, count, block, sums);
      },
      finish);
}

}  // namespace
