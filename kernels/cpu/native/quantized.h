// Products of rows with blocks of weights in 8 or 4 bits.
//
// Blocks are those of gemm.h, but whole vectors wide: columns are added to a narrower one. In a
// block lie, in the order in which they are read,
//   8 bits: the columns' scales in fp32; then, for each 4 of K, their 4 bytes of each column.
//     A weight is (byte - 128) * scale.
//   4 bits: for each group of K (the last may be shorter), the columns' scales in fp16, their zeros
//     as bytes, and then, for each 8 of K, 4 bytes of each column: the low halves are the first
//     four, the high halves the next four. A weight is (half - zero) * scale.
// K is a multiple of 8.
//
// Rows are rounded to 8 bits with a scale for each group of K. Within a group, sums are integers and
// exact; each sum of groups has one accumulator, from first to last. So bits depend neither on a
// row's company nor on the instruction set.
#pragma once

#include "api.h"
#include "gemm.h"
#include "integers.h"
#include "parallel.h"
#include "scratch.h"

namespace {

// A row in memory: K signed bytes, and for each group of K a scale (fp32), and the sum of its bytes.
struct RowLayout {
  int64_t columns, group, groups;

  RowLayout(int64_t columns, int64_t group)
      : columns(columns), group(group), groups((columns + group - 1) / group) {}
  int64_t bytes() const { return (columns + 8 * groups + 63) / 64 * 64; }
  float* scales(char* row) const { return reinterpret_cast<float*>(row + columns); }
  const float* scales(const char* row) const {
    return reinterpret_cast<const float*>(row + columns);
  }
  int32_t* sums(char* row) const { return reinterpret_cast<int32_t*>(scales(row) + groups); }
  const int32_t* sums(const char* row) const {
    return reinterpret_cast<const int32_t*>(scales(row) + groups);
  }
  int64_t length(int64_t g) const {
    return columns - g * group < group ? columns - g * group : group;
  }
};

struct QuantizedBlock {
  const char* data;
  RowLayout layout;
  int width, padded;
};

// In each 32 bits: four unsigned bytes of a column times four signed ones of a row, added to a sum.
// `Quad`: the four of a row, in all lanes.
#if defined(__AVX512VNNI__)
template <int BITS>
struct QuadStep {
  using Quad = Ints;
  static Quad quad(uint32_t x) { return set1_int(x); }
  static Ints multiply(Ints sum, Ints w, Quad x) {
    // By name: for the intrinsic, GCC 12 moves each sum to another register and back.
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
    return sum;
  }
};
#else
// Two products of whole bytes may be too much for 16 bits.
template <int BITS>
struct QuadStep {
  struct Quad {
    Ints even, odd;
  };
  static Quad quad(uint32_t x) { return {even_signed(set1_int(x)), odd_signed(set1_int(x))}; }
  static Ints multiply(Ints sum, Ints w, Quad x) {
    Ints pairs = add_ints(add_pairs(even_bytes(w), x.even), add_pairs(odd_bytes(w), x.odd));
    return add_ints(sum, pairs);
  }
};
// Products of half bytes fit: 2 * 15 * 128.
template <>
struct QuadStep<4> {
  using Quad = Ints;
  static Quad quad(uint32_t x) { return set1_int(x); }
  static Ints multiply(Ints sum, Ints w, Quad x) {
    return add_ints(sum, add_pairs(add_byte_pairs(w, x), set1_int(0x00010001u)));
  }
};
#endif

template <int BITS, int M, int V>
inline void multiply_quads(const char* const* rows, int64_t k, const Ints* w, Ints (*sums)[V]) {
  using Step = QuadStep<BITS>;
#pragma GCC unroll 8
  for (int i = 0; i < M; i++) {
    uint32_t four;
    memcpy(&four, rows[i] + k, 4);
    const typename Step::Quad x = Step::quad(four);
#pragma GCC unroll 8
    for (int j = 0; j < V; j++) sums[i][j] = Step::multiply(sums[i][j], w[j], x);
  }
}

// M rows by V vectors of columns from `column` on, for columns `k` .. `stop` of the rows.
template <int BITS, int M, int V>
inline void multiply_group(const char* const* rows, int64_t k, int64_t stop, const char* weights,
                           int64_t step_bytes, Ints (*sums)[V]) {
  const Ints low = set1_int(0x0F0F0F0Fu);
  for (; k < stop; k += 32 / BITS, weights += step_bytes) {
    Ints w[V];
#pragma GCC unroll 8
    for (int j = 0; j < V; j++) w[j] = load_ints(weights + j * LANES * 4);
    if (BITS == 8) {
      multiply_quads<BITS, M, V>(rows, k, w, sums);
    } else {
      Ints half[V];
#pragma GCC unroll 8
      for (int j = 0; j < V; j++) half[j] = and_ints(w[j], low);
      multiply_quads<BITS, M, V>(rows, k, half, sums);
#pragma GCC unroll 8
      for (int j = 0; j < V; j++) half[j] = and_ints(high_halves(w[j]), low);
      multiply_quads<BITS, M, V>(rows, k + 4, half, sums);
    }
  }
}

// M rows by V vectors of columns from `column` on -> `out` [M, 64].
template <int BITS, int M, int V>
inline void multiply_quantized_panel(const char* const* rows, const QuantizedBlock& block,
                                     int column, float* out) {
  const RowLayout& layout = block.layout;
  const int64_t step_bytes = block.padded * 4;
  const char* weights = block.data + (BITS == 8 ? step_bytes : 0);
  for (int64_t g = 0; g < layout.groups; g++) {
    const char* scales = weights + column * 2;
    const char* zeros = weights + block.padded * 2 + column;
    if (BITS == 4) weights += block.padded * 3;
    const int64_t length = layout.length(g), k = g * layout.group;
    Ints sums[M][V];
#pragma GCC unroll 8
    for (int i = 0; i < M; i++) {
      const int32_t bytes = BITS == 8 ? layout.sums(rows[i])[g] * -128 : 0;
#pragma GCC unroll 8
      for (int j = 0; j < V; j++) sums[i][j] = set1_int(static_cast<uint32_t>(bytes));
    }
    multiply_group<BITS, M, V>(rows, k, k + length, weights + column * 4, step_bytes, sums);
    weights += length / (32 / BITS) * step_bytes;
#pragma GCC unroll 8
    for (int j = 0; j < V; j++) {
      Vec scale, zero;
      if (BITS == 4) {
        scale = load_halves(scales + j * LANES * 2);
        zero = sub(set1(0.0f), load_bytes(zeros + j * LANES));
      }
#pragma GCC unroll 8
      for (int i = 0; i < M; i++) {
        float* to = out + i * BLOCK + j * LANES;
        const Vec row_scale = set1(layout.scales(rows[i])[g]);
        const Vec before = g ? load(to) : set1(0.0f);
        Vec product = to_float(sums[i][j]);
        if (BITS == 8) {
          store(to, fma(product, row_scale, before));
        } else {
          // Integers below 2^24: exact.
          product = fma(zero, set1(static_cast<float>(layout.sums(rows[i])[g])), product);
          store(to, fma(product, mul(scale, row_scale), before));
        }
      }
    }
  }
  if (BITS == 8)
#pragma GCC unroll 8
    for (int i = 0; i < M; i++)
#pragma GCC unroll 8
      for (int j = 0; j < V; j++) {
        float* to = out + i * BLOCK + j * LANES;
        const char* scales = block.data + (column + j * LANES) * 4;
        store(to, mul(load(to), load(reinterpret_cast<const float*>(scales))));
      }
}

template <int BITS, int M>
void multiply_quantized_rows(const char* const* rows, const QuantizedBlock& block, float* out) {
  constexpr int COLUMNS = PANEL * LANES;
  int column = 0;
  for (; column + COLUMNS <= block.padded; column += COLUMNS)
    multiply_quantized_panel<BITS, M, PANEL>(rows, block, column, out + column);
  for (; column < block.padded; column += LANES)
    multiply_quantized_panel<BITS, M, 1>(rows, block, column, out + column);
}

template <int BITS>
void multiply_quantized_few(const char* const* rows, int count, const QuantizedBlock& block,
                            float* out) {
  switch (count) {
    case 1: return multiply_quantized_rows<BITS, 1>(rows, block, out);
    case 2: return multiply_quantized_rows<BITS, 2>(rows, block, out);
    case 3: return multiply_quantized_rows<BITS, 3>(rows, block, out);
    case 4: return multiply_quantized_rows<BITS, 4>(rows, block, out);
#if defined(__AVX512F__)
    case 5: return multiply_quantized_rows<BITS, 5>(rows, block, out);
    case 6: return multiply_quantized_rows<BITS, 6>(rows, block, out);
#endif
  }
}

// How experts.h multiplies: T is what rows come and results go in.
template <class T, int B>
struct QuantizedStep {
  using Element = T;
  static constexpr int BITS = B;
};

// Bytes of `columns` columns of the product.
inline int64_t column_bytes(const PackedWeight& weight, int64_t columns) {
  const int64_t groups = (weight.columns + weight.group - 1) / weight.group;
  return columns * (weight.bits == 8 ? weight.columns + 4 : weight.columns / 2 + 3 * groups);
}

template <class T, int BITS>
QuantizedBlock block_of(QuantizedStep<T, BITS>, const PackedWeight& weight, int64_t expert,
                        int64_t number) {
  const int64_t left = weight.rows - number * BLOCK;
  const int width = static_cast<int>(left < BLOCK ? left : BLOCK);
  const char* data = static_cast<const char*>(weight.data) +
                     expert * column_bytes(weight, (weight.rows + 15) / 16 * 16) +
                     number * column_bytes(weight, BLOCK);
  return {data, RowLayout(weight.columns, weight.group), width, (width + 15) / 16 * 16};
}

// As for other blocks; see gemm.h.
template <class Step, class Finish>
void multiply_block(const Rows& rows, int64_t first, int64_t stop, const QuantizedBlock& block,
                    Finish finish) {
  multiply_in_turns(
      rows, first, stop,
      [&](const char* const* at, int count, float* sums) {
        multiply_quantized_few<Step::BITS>(at, count, block, sums);
      },
      finish);
}

// To the nearest of 127 steps each way, ties to even. Where a group holds a NaN or an infinity, its
// scale is none either, and so is no product with it. Groups smaller than 2^-100 count as zeros.
template <class T>
void quantize_group(const T* x, int64_t length, char* to, float* scale, int32_t* sum) {
  Ints most = set1_int(0);
  for (int64_t k = 0; k < length; k += LANES) {
    const int n = length - k < LANES ? static_cast<int>(length - k) : LANES;
    most = max_ints(most, and_ints(bits_of(load(x + k, n)), set1_int(0x7FFFFFFFu)));
  }
  int32_t lanes[LANES], bits = 0;
  memcpy(lanes, &most, sizeof lanes);
  for (int32_t lane : lanes) bits = lane > bits ? lane : bits;
  float largest;
  memcpy(&largest, &bits, 4);
  const bool is_zero = largest < 0x1p-100f;
  *scale = is_zero ? 0.0f : largest / 127.0f;
  const Vec factor = set1(is_zero ? 0.0f : 127.0f / largest);
  Ints sums = set1_int(0);
  for (int64_t k = 0; k < length; k += LANES) {
    const int n = length - k < LANES ? static_cast<int>(length - k) : LANES;
    const Ints codes = nearest(mul(load(x + k, n), factor));
    sums = add_ints(sums, codes);
    alignas(16) char bytes[LANES];
    store_bytes(n == LANES ? to + k : bytes, codes);
    if (n < LANES) memcpy(to + k, bytes, n);
  }
  memcpy(lanes, &sums, sizeof lanes);
  // Codes of what is not finite may add up to anything.
  uint32_t total = 0;
  for (int32_t lane : lanes) total += static_cast<uint32_t>(lane);
  *sum = static_cast<int32_t>(total);
}

// Rows 0 .. `count` of `rows`, whatever their index, become rows of 8 bits.
template <class T>
bool quantize_rows(Rows* rows, int64_t count, const RowLayout& layout, int num_threads) {
  static thread_local Scratch kept;
  const int64_t bytes = layout.bytes();
  char* to = kept.take<char>(count * bytes);
  if (count && !to) return false;
  const Rows from{rows->base, rows->stride, nullptr};
  // Enough for a thread to be worth waking.
  const int64_t part = layout.columns < 16384 ? 16384 / layout.columns : 1;
  for_each_run(count, part, num_threads, [=](int64_t first, int64_t stop) {
    for (int64_t r = first; r < stop; r++) {
      const T* x = reinterpret_cast<const T*>(from.at(r));
      char* row = to + r * bytes;
      for (int64_t g = 0; g < layout.groups; g++)
        quantize_group(x + g * layout.group, layout.length(g), row + g * layout.group,
                       layout.scales(row) + g, layout.sums(row) + g);
    }
  });
  *rows = {to, bytes, rows->index};
  return true;
}

// Row r is at `rows->index[r]` of `num_sources`, or without an index row r of as many.
template <class T, int BITS>
bool prepare(QuantizedStep<T, BITS>, Rows* rows, int64_t, int64_t num_sources,
             const PackedWeight& weight, int num_threads) {
  return quantize_rows<T>(rows, num_sources, RowLayout(weight.columns, weight.group), num_threads);
}

}  // namespace
