// How weights are cut: 64 of their rows, which are the product's columns, are a block.
#pragma once

#include <stdint.h>

namespace {

constexpr int BLOCK = 64;

// Source row of column `j` of the block at `first`: in paired weights, half of a block are gates
// and half are the ups of the same numbers.
inline int64_t row_in(int64_t first, int64_t width, int64_t j, int64_t rows, bool paired) {
  if (!paired) return first + j;
  const int64_t half = width / 2;
  return j < half ? first / 2 + j : rows / 2 + first / 2 + (j - half);
}

}  // namespace
