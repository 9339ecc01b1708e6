// Products of few rows with a tile while the next tile is fetched.
#pragma once

#include "key_tiles.h"

namespace {

// As `multiply_panel`, bit for bit.
template <class Step, int M, int V>
inline void multiply_fetching(const char* rows, int64_t row_bytes, const char* weights,
                              int64_t steps, int64_t step_bytes, Fetcher* fetcher, float* out) {
  Vec sums[M][V];
#pragma GCC unroll 8
  for (int i = 0; i < M; i++)
#pragma GCC unroll 8
    for (int j = 0; j < V; j++) sums[i][j] = set1(0.0f);
  for (int64_t step = 0; step < steps; step++, weights += step_bytes) {
    typename Step::Weights w[V];
#pragma GCC unroll 8
    for (int j = 0; j < V; j++) w[j] = Step::weights(load_ints(weights + j * LANES * 4));
    fetcher->fetch(FETCHED_MULTIPLYING);
#pragma GCC unroll 8
    for (int i = 0; i < M; i++) {
      auto x = Step::value(rows + i * row_bytes, step);
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
void multiply_fetching(const Rows& rows, int64_t first, const Block& block, Fetcher* fetcher,
                       float* out) {
  constexpr int V = PANEL, HALF = 32 / LANES < PANEL ? 32 / LANES : PANEL;
  const int64_t step_bytes = block.width * 4;
  if (block.width == BLOCK)
    for (int column = 0; column < BLOCK; column += V * LANES)
      multiply_fetching<Step, M, V>(rows.at(first), rows.stride, block.data + column * 4,
                                    block.steps, step_bytes, fetcher, out + column);
  else
    for (int column = 0; column < block.width; column += HALF * LANES)
      multiply_fetching<Step, M, HALF>(rows.at(first), rows.stride, block.data + column * 4,
                                       block.steps, step_bytes, fetcher, out + column);
}

// As `multiply_block`, for rows that lie one after the other and blocks of 32 or 64 columns.
template <class Step, class Finish>
void multiply_tile(const Rows& rows, int64_t first, int64_t stop, const Block& block,
                   Fetcher* fetcher, Finish finish) {
#if defined(MOE_SERVE_AMX)
  const bool is_few = sizeof(typename Step::Element) == 4 && stop - first <= MOST_ROWS;
#else
  const bool is_few = stop - first <= MOST_ROWS;
#endif
  if (!is_few) return multiply_block<Step>(rows, first, stop, block, finish);
  alignas(64) float sums[MOST_ROWS * BLOCK];
  switch (stop - first) {
    case 1: multiply_fetching<Step, 1>(rows, first, block, fetcher, sums); break;
    case 2: multiply_fetching<Step, 2>(rows, first, block, fetcher, sums); break;
    case 3: multiply_fetching<Step, 3>(rows, first, block, fetcher, sums); break;
    case 4: multiply_fetching<Step, 4>(rows, first, block, fetcher, sums); break;
#if defined(__AVX512F__)
    case 5: multiply_fetching<Step, 5>(rows, first, block, fetcher, sums); break;
    case 6: multiply_fetching<Step, 6>(rows, first, block, fetcher, sums); break;
#endif
  }
  finish(first, static_cast<int>(stop - first), sums);
}

}  // namespace
