// Products of rows with packed blocks of bf16 by AMX tiles.
//
// A tile of weights is 16 steps by 16 columns, as they lie in the block; one of rows is 16 rows by
// 16 steps. Every product goes through tiles of the same kind, however few rows there are.
#pragma once

#if defined(MOE_SERVE_AMX)

#include "simd.h"

namespace {

#if defined(MOE_SERVE_EMULATE_AMX)

// The tile instructions in plain code, for testing where there are none.
struct TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
struct Tiles {
  TileConfig config;
  uint8_t data[8][16][64];
};
inline Tiles& tiles() {
  static thread_local Tiles kept;
  return kept;
}
inline void load_config(const void* config) {
  memset(&tiles(), 0, sizeof(Tiles));
  memcpy(&tiles().config, config, sizeof(TileConfig));
}
inline void release_tiles() {}
template <int T>
inline void load_tile(const void* from, int64_t stride) {
  memset(tiles().data[T], 0, sizeof tiles().data[T]);
  for (int r = 0; r < tiles().config.rows[T]; r++)
    memcpy(tiles().data[T][r], static_cast<const char*>(from) + r * stride,
           tiles().config.row_bytes[T]);
}
template <int T>
inline void store_tile(void* to, int64_t stride) {
  for (int r = 0; r < tiles().config.rows[T]; r++)
    memcpy(static_cast<char*>(to) + r * stride, tiles().data[T][r], tiles().config.row_bytes[T]);
}
template <int T>
inline void zero_tile() {
  memset(tiles().data[T], 0, sizeof tiles().data[T]);
}
template <int TO, int A, int B>
inline void multiply_tile() {
  auto value = [](const uint8_t* at) {
    uint16_t half;
    memcpy(&half, at, 2);
    uint32_t bits = static_cast<uint32_t>(half) << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
  };
  auto& t = tiles();
  for (int m = 0; m < t.config.rows[TO]; m++)
    for (int n = 0; n < t.config.row_bytes[TO] / 4; n++) {
      float sum;
      memcpy(&sum, t.data[TO][m] + 4 * n, 4);
      for (int k = 0; k < t.config.row_bytes[A] / 4; k++)
        for (int half = 0; half < 4; half += 2)
          sum = __builtin_fmaf(value(t.data[A][m] + 4 * k + half),
                               value(t.data[B][k] + 4 * n + half), sum);
      memcpy(t.data[TO][m] + 4 * n, &sum, 4);
    }
}

#else

struct TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
// Written out: GCC's own intrinsics take no template's number for a tile's.
inline void load_config(const void* config) {
  asm volatile("ldtilecfg (%0)" : : "r"(config) : "memory");
}
inline void release_tiles() { asm volatile("tilerelease"); }
template <int T>
inline void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "n"(T) : "memory");
}
template <int T>
inline void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "n"(T) : "memory");
}
template <int T>
inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" : : "n"(T));
}
template <int TO, int A, int B>
inline void multiply_tile() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "n"(TO), "n"(A), "n"(B));
}

#endif

// Tiles 0-3: sums; 4 and 5: rows; 6 and 7: weights.
inline void configure_tiles(int first_rows, int second_rows) {
  alignas(64) TileConfig config;
  memset(&config, 0, sizeof config);
  config.palette = 1;
  for (int t = 0; t < 8; t++) {
    config.row_bytes[t] = 64;
    config.rows[t] = 16;
  }
  config.rows[0] = config.rows[1] = config.rows[4] = static_cast<uint8_t>(first_rows);
  config.rows[2] = config.rows[3] = config.rows[5] = static_cast<uint8_t>(second_rows);
  load_config(&config);
}

// Up to 32 rows of `row_bytes`, one after the other, by up to 32 columns of a block -> sums
// [rows, 64]. Where K ends within a tile, zeros fill it up.
template <bool TWO>
inline void multiply_quarter(const char* rows, int64_t row_bytes, int num_rows, const char* weights,
                             int64_t steps, int64_t step_bytes, int columns, float* sums) {
  zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
  const char* second = rows + 16 * row_bytes;
  int64_t step = 0;
  if (columns == 32) {
    for (; step + 16 <= steps; step += 16) {
      const char* w = weights + step * step_bytes;
      load_tile<4>(rows + step * 4, row_bytes);
      load_tile<6>(w, step_bytes);
      multiply_tile<0, 4, 6>();
      load_tile<7>(w + 64, step_bytes);
      multiply_tile<1, 4, 7>();
      if (TWO) {
        load_tile<5>(second + step * 4, row_bytes);
        multiply_tile<2, 5, 6>();
        multiply_tile<3, 5, 7>();
      }
    }
  }
  for (; step < steps; step += 16) {
    alignas(64) char x[32 * 64] = {}, w[16 * 128] = {};
    int64_t count = steps - step < 16 ? steps - step : 16;
    for (int r = 0; r < num_rows; r++) memcpy(x + r * 64, rows + r * row_bytes + step * 4, count * 4);
    for (int64_t k = 0; k < count; k++)
      memcpy(w + k * 128, weights + (step + k) * step_bytes, columns * 4);
    load_tile<4>(x, 64);
    load_tile<6>(w, 128);
    multiply_tile<0, 4, 6>();
    load_tile<7>(w + 64, 128);
    multiply_tile<1, 4, 7>();
    if (TWO) {
      load_tile<5>(x + 1024, 64);
      multiply_tile<2, 5, 6>();
      multiply_tile<3, 5, 7>();
    }
  }
  store_tile<0>(sums, 256);
  store_tile<1>(sums + 16, 256);
  if (TWO) {
    store_tile<2>(sums + 16 * 64, 256);
    store_tile<3>(sums + 16 * 64 + 16, 256);
  }
}

// As `multiply_block`. Rows must lie one after the other: `gather` sees to that.
template <class RowsT, class BlockT, class Finish>
void multiply_tiles(const RowsT& rows, int64_t first, int64_t stop, const BlockT& block,
                    Finish finish) {
  alignas(64) float sums[32 * 64];
  const int64_t step_bytes = block.width * 4;
  for (int64_t r = first; r < stop; r += 32) {
    int count = stop - r < 32 ? static_cast<int>(stop - r) : 32;
    configure_tiles(count < 16 ? count : 16, count > 16 ? count - 16 : 1);
    const char* at = rows.at(r);
    for (int column = 0; column < block.width; column += 32) {
      int columns = block.width - column < 32 ? block.width - column : 32;
      auto multiply = count > 16 ? multiply_quarter<true> : multiply_quarter<false>;
      multiply(at, rows.stride, count, block.data + column * 4, block.steps, step_bytes, columns,
               sums + column);
    }
    finish(r, count, sums);
  }
  // Used tiles are saved whenever the thread is interrupted.
  release_tiles();
}

}  // namespace

#endif
