// Rounds weights to 8 or 4 bits, in the order of quantized.h.
#pragma once

#include "blocks.h"
#include "quantized.h"

namespace {

// Column `j` of a block: its scales and bytes.
struct QuantizedColumn {
  char* block;
  int64_t columns, group, padded, j;

  void store_scale(float scale) const { memcpy(block + j * 4, &scale, 4); }
  char* group_at(int64_t g) const { return block + g * padded * (3 + group / 2); }
  void store_bytes(const uint8_t* codes) const {
    for (int64_t k = 0; k < columns; k += 4)
      memcpy(block + padded * 4 + k * padded + j * 4, codes + k, 4);
  }
  void store_halves(int64_t g, const uint8_t* codes, int64_t length, uint16_t scale,
                    uint8_t zero) const {
    char* to = group_at(g);
    memcpy(to + j * 2, &scale, 2);
    memcpy(to + padded * 2 + j, &zero, 1);
    for (int64_t k = 0; k < length; k += 8) {
      uint32_t first, second;
      memcpy(&first, codes + k, 4);
      memcpy(&second, codes + k + 4, 4);
      first |= second << 4;
      memcpy(to + padded * 3 + k / 2 * padded + j * 4, &first, 4);
    }
  }
};

inline uint16_t to_half(float x) { return static_cast<uint16_t>(_cvtss_sh(x, 0)); }
inline float from_half(uint16_t x) { return _cvtsh_ss(x); }

// Symmetric: the largest of the row becomes 127 steps.
template <class T>
void quantize_to_8(const T* from, const QuantizedColumn& column, uint8_t* codes) {
  float scale;
  int32_t sum;
  quantize_group(from, column.columns, reinterpret_cast<char*>(codes), &scale, &sum);
  for (int64_t k = 0; k < column.columns; k++) codes[k] ^= 0x80;
  column.store_scale(scale);
  column.store_bytes(codes);
}

// Least and largest of some numbers and 0; `is_finite`: all of them are.
struct Range {
  float low, high;
  bool is_finite;
};

template <class T>
Range range_of(const T* from, int64_t length) {
  Vec low = set1(0.0f), high = set1(0.0f), zeros = set1(0.0f);
  for (int64_t k = 0; k < length; k += LANES) {
    const int n = length - k < LANES ? static_cast<int>(length - k) : LANES;
    const Vec x = load(from + k, n);
    low = min(low, x);
    high = max(high, x);
    zeros = add(zeros, mul(x, set1(0.0f)));
  }
  return {-largest(sub(set1(0.0f), low)), largest(high), sum(zeros) == 0.0f};
}

// The numbers' range, made to hold 0, becomes 15 steps, and 0 one of them.
template <class T>
void quantize_to_4(const T* from, const QuantizedColumn& column, int64_t g, int64_t length,
                   uint8_t* codes) {
  const Range range = range_of(from, length);
  const float step = range.is_finite ? (range.high - range.low) / 15.0f : __builtin_nanf("");
  const uint16_t half = to_half(step);
  const float scale = from_half(half), factor = scale > 0.0f ? 1.0f / scale : 0.0f;
  const float low = range.is_finite ? -range.low * factor : 0.0f;
  const Vec zero = min(set1(15.0f), max(set1(0.0f), round(set1(low))));
  for (int64_t k = 0; k < length; k += LANES) {
    const int n = length - k < LANES ? static_cast<int>(length - k) : LANES;
    const Vec code = add(round(mul(load(from + k, n), set1(factor))), zero);
    // Past the end lies room for a whole vector.
    store_bytes(codes + k, nearest(min(set1(15.0f), max(set1(0.0f), code))));
  }
  float lanes[LANES];
  store(lanes, zero);
  column.store_halves(g, codes, length, half, static_cast<uint8_t>(lanes[0]));
}

// A block's columns; `rows` are those of the whole matrix.
template <class T>
void quantize_block(const T* from, const QuantizeCall& call, int64_t first, char* to,
                    uint8_t* codes) {
  const int64_t left = call.rows - first, width = left < BLOCK ? left : BLOCK;
  const int64_t padded = (width + 15) / 16 * 16;
  for (int64_t j = 0; j < width; j++) {
    const T* row = from + row_in(first, width, j, call.rows, call.is_paired) * call.columns;
    const QuantizedColumn column{to, call.columns, call.group, padded, j};
    if (call.bits == 8) {
      quantize_to_8(row, column, codes);
    } else {
      const RowLayout layout(call.columns, call.group);
      for (int64_t g = 0; g < layout.groups; g++)
        quantize_to_4(row + g * call.group, column, g, layout.length(g), codes);
    }
  }
}

// Memory of `to` must be zero: the columns that are added to a block stay so.
template <class T>
int run_quantize(const QuantizeCall& call) {
  const PackedWeight weight{call.to, call.matrices, call.rows, call.columns, call.bits, call.group};
  const int64_t num_blocks = (call.rows + BLOCK - 1) / BLOCK;
  bool has_failed = false;
  for_each(call.matrices * num_blocks, call.threads, [&](int64_t item) {
    static thread_local Scratch kept;
    uint8_t* codes = kept.take<uint8_t>(call.columns + LANES);
    if (!codes) return __atomic_store_n(&has_failed, true, __ATOMIC_RELAXED);
    const int64_t m = item / num_blocks, number = item % num_blocks;
    const auto block = block_of(QuantizedStep<T, 8>{}, weight, m, number);
    quantize_block(static_cast<const T*>(call.from) + m * call.rows * call.columns, call,
                   number * BLOCK, const_cast<char*>(block.data), codes);
  });
  return has_failed ? MOE_SERVE_NO_MEMORY : MOE_SERVE_DONE;
}

}  // namespace
