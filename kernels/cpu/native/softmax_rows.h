// The running softmax of one row of attention, and what a tile of 64 scores does to it.
#pragma once

#include "key_tiles.h"

namespace {

// A row's record, in floats: the largest score so far, in powers of two; the sum of all weights;
// the same sum by lanes, while it grows; the weighed values.
constexpr int64_t MAXIMUM = 0, TOTAL = 1, LANE_TOTALS = 16, VALUES = 32;
inline int64_t record_floats(int64_t head_dim) { return VALUES + head_dim; }

constexpr float LOG2_E = 1.44269504088896341f;
// Finite, so that nothing computes inf - inf.
constexpr float NO_KEY_YET = -1e30f;

// 2^x for x up to 127, zero below -126; NaN stays NaN. 2^n times a polynomial on |r| <= 1/2, the
// Chebyshev interpolation of degree 6, which is off by 3e-9 at most.
inline Vec power_of_two(Vec x) {
  Vec clamped = max(set1(-126.0f), x);
  Vec n = round(clamped), r = sub(clamped, n);
  Vec p = set1(1.54697320e-4f);
  p = fma(p, r, set1(1.34004322e-3f));
  p = fma(p, r, set1(9.61802560e-3f));
  p = fma(p, r, set1(5.55032721e-2f));
  p = fma(p, r, set1(2.40226512e-1f));
  p = fma(p, r, set1(6.93147207e-1f));
  p = fma(p, r, set1(1.0f));
#if defined(__AVX512F__)
  p = _mm512_scalef_ps(p, n);
#else
  p = mul(p, pow2(n));
#endif
  return zero_where_less(x, set1(-126.0f), p);
}
inline float power_of_two(float x) {
  float lanes[LANES];
  store(lanes, power_of_two(set1(x)));
  return lanes[0];
}

inline void store_weights(float* to, Vec x) { store(to, x); }
inline void store_weights(bf16* to, Vec x) {
#if defined(__AVX512BF16__)
  auto halves = _mm512_cvtneps_pbh(x);
  memcpy(to, &halves, sizeof halves);
#else
  store(to, x);
#endif
}

// Of a tile's keys a row sees `low` .. `high`.
inline void hide_keys(float* scores, int64_t low, int64_t high) {
  for (int64_t i = 0; i < low; i++) scores[i] = -__builtin_inff();
  for (int64_t i = high < 0 ? 0 : high; i < TILE; i++) scores[i] = -__builtin_inff();
}

// The new maxima of `count` rows, and what is kept of what they summed up so far -> `keep`.
inline void raise_maxima(const float* scores, int count, float scale, float* records,
                         int64_t stride, float* keep) {
  for (int i = 0; i < count; i++, scores += TILE, records += stride) {
    Vec most = load(scores);
    for (int j = LANES; j < TILE; j += LANES) most = max(most, load(scores + j));
    const float found = largest(most) * scale, before = records[MAXIMUM];
    records[MAXIMUM] = found > before ? found : before;
    keep[i] = before - records[MAXIMUM];
  }
  for (int i = 0; i < count; i += LANES) {
    const int n = count - i < LANES ? count - i : LANES;
    store(keep + i, power_of_two(load(keep + i, n)), n);
  }
}

// The weights of a tile's keys, the largest score of all being 1; and their sums.
template <class T>
inline void weigh_keys(const float* scores, float scale, float keep, float* record, T* weights) {
  const Vec maximum = set1(-record[MAXIMUM]);
  Vec total = mul(load(record + LANE_TOTALS), set1(keep));
  for (int j = 0; j < TILE; j += LANES) {
    Vec x = power_of_two(fma(load(scores + j), set1(scale), maximum));
    total = add(total, x);
    store_weights(weights + j, x);
  }
  store(record + LANE_TOTALS, total);
}

inline void add_values(const float* sums, float keep, int width, float* values) {
  for (int j = 0; j < width; j += LANES)
    store(values + j, fma(load(values + j), set1(keep), load(sums + j)));
}

inline void clear_record(float* record, int64_t head_dim) {
  memset(record, 0, record_floats(head_dim) * sizeof(float));
  record[MAXIMUM] = NO_KEY_YET;
}

inline void close_record(float* record) { record[TOTAL] = sum(load(record + LANE_TOTALS)); }

// Into what is there takes `split`, or into nothing where `is_first`. They may be the same then.
inline void merge_record(float* record, const float* split, bool is_first, int64_t head_dim) {
  if (is_first) {
    if (record != split) memcpy(record, split, record_floats(head_dim) * sizeof(float));
    return;
  }
  const float before = record[MAXIMUM], added = split[MAXIMUM];
  const float maximum = added > before ? added : before;
  const float keep = power_of_two(before - maximum), take = power_of_two(added - maximum);
  record[MAXIMUM] = maximum;
  record[TOTAL] = record[TOTAL] * keep + split[TOTAL] * take;
  for (int64_t j = VALUES; j < VALUES + head_dim; j += LANES)
    store(record + j, fma(load(split + j), set1(take), mul(load(record + j), set1(keep))));
}

template <class T>
inline void store_result(const float* record, float scale, int64_t head_dim, T* to) {
  const Vec factor = set1(scale / record[TOTAL]);
  for (int64_t j = 0; j < head_dim; j += LANES)
    store(to + j, mul(load(record + VALUES + j), factor));
}

}  // namespace
