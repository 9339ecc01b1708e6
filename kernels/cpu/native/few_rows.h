// Attention of few query rows over one tile of keys: straight from the pool, nothing is packed.
//
// Bit for bit what the packed tile gives: each sum has one accumulator that takes the same steps in
// the same order. Only AVX-512 has the registers for it.
#pragma once

#include "key_tiles.h"

namespace {

#if defined(__AVX512F__)

// A row's sums must come from the same instructions, however many rows there are.
template <class Step>
inline bool is_few(int64_t rows) {
#if defined(MOE_SERVE_AMX)
  if (sizeof(typename Step::Element) == 2) return false;
#endif
  return rows <= MOST_ROWS;
}

// Scores of M queries, one after the other, with 16 keys -> `out` [M, TILE].
template <class Step, int M>
inline void score_keys(const char* queries, const char* const* keys, int64_t row_bytes,
                       Fetcher* fetcher, float* out) {
  Vec sums[M];
#pragma GCC unroll 8
  for (int i = 0; i < M; i++) sums[i] = set1(0.0f);
  for (int64_t at = 0; at < row_bytes; at += 16) {
    Ints turned[4];
    turn_rows(keys, at, turned);
    fetcher->fetch<FETCHED>();
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
      auto w = Step::weights(turned[k]);
#pragma GCC unroll 8
      for (int i = 0; i < M; i++)
        sums[i] = Step::multiply(sums[i], w, Step::value(queries + i * row_bytes, at / 4 + k));
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < M; i++) store(out + i * TILE, sums[i]);
}

// A step over keys: V vectors of columns.
template <int V>
inline void value_columns(const PairStep&, const char* const* values, int64_t step, int64_t column,
                          Ints* to) {
#pragma GCC unroll 4
  for (int j = 0; j < V; j += 2)
    pair_rows(values[2 * step] + column * 2 + j * 32, values[2 * step + 1] + column * 2 + j * 32,
              to + j);
}
template <int V>
inline void value_columns(const FloatStep&, const char* const* values, int64_t step, int64_t column,
                          Ints* to) {
#pragma GCC unroll 4
  for (int j = 0; j < V; j++) to[j] = load_ints(values[step] + column * 4 + j * 64);
}

// M rows of weights, one after the other, times V vectors of columns -> `out` [M, BLOCK].
template <class Step, int M, int V>
inline void weigh_values(const char* weights, const char* const* values, int64_t column,
                         Fetcher* fetcher, float* out) {
  constexpr int64_t SIZE = sizeof(typename Step::Element);
  Vec sums[M][V];
#pragma GCC unroll 8
  for (int i = 0; i < M; i++)
#pragma GCC unroll 4
    for (int j = 0; j < V; j++) sums[i][j] = set1(0.0f);
  for (int64_t step = 0; step < TILE * SIZE / 4; step++) {
    Ints columns[V];
    value_columns<V>(Step{}, values, step, column, columns);
    fetcher->fetch<FETCHED>();
#pragma GCC unroll 8
    for (int i = 0; i < M; i++) {
      auto x = Step::value(weights + i * TILE * SIZE, step);
#pragma GCC unroll 4
      for (int j = 0; j < V; j++)
        sums[i][j] = Step::multiply(sums[i][j], Step::weights(columns[j]), x);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < M; i++)
#pragma GCC unroll 4
    for (int j = 0; j < V; j++) store(out + i * BLOCK + j * LANES, sums[i][j]);
}

template <int N>
struct Number {
  static constexpr int VALUE = N;
};

// Calls with(Number<rows>).
template <class With>
inline void with_rows(int64_t rows, With with) {
  switch (rows) {
    case 1: return with(Number<1>{});
    case 2: return with(Number<2>{});
    case 3: return with(Number<3>{});
    case 4: return with(Number<4>{});
    case 5: return with(Number<5>{});
    case 6: return with(Number<6>{});
  }
}

// All keys of a tile -> `out` [rows, TILE].
template <class Step>
void score_few(const void* queries, int64_t rows, const char* base, const Places& places,
               int64_t row_bytes, Fetcher* fetcher, float* out) {
  for (int key = 0; key < TILE; key += 16) {
    const char* keys[16];
    for (int i = 0; i < 16; i++) keys[i] = places.row(base, key + i);
    with_rows(rows, [&](auto m) {
      score_keys<Step, decltype(m)::VALUE>(static_cast<const char*>(queries), keys, row_bytes,
                                           fetcher, out + key);
    });
  }
}

// Calls finish(column, width, sums [rows, BLOCK]) for all columns of the values.
template <class Step, class Finish>
void weigh_few(const void* weights, int64_t rows, const char* base, const Places& places,
               int64_t head_dim, Fetcher* fetcher, Finish finish) {
  alignas(64) float sums[MOST_ROWS * BLOCK];
  const char *values[TILE], *from = static_cast<const char*>(weights);
  for (int key = 0; key < TILE; key++) values[key] = places.row(base, key);
  for (int64_t column = 0; column < head_dim; column += BLOCK) {
    const bool is_whole = head_dim - column >= BLOCK;
    with_rows(rows, [&](auto m) {
      constexpr int M = decltype(m)::VALUE;
      if (is_whole)
        weigh_values<Step, M, 4>(from, values, column, fetcher, sums);
      else
        weigh_values<Step, M, 2>(from, values, column, fetcher, sums);
    });
    finish(column, is_whole ? BLOCK : BLOCK / 2, sums);
  }
}

#endif

}  // namespace
