// Tiles of keys and values out of a paged pool, packed as gemm.h reads weights.
//
// A tile is 64 positions of a sequence; which ones depends on nothing: tile j begins at 64 j.
#pragma once

#include "gemm.h"

namespace {

constexpr int TILE = BLOCK;
constexpr int64_t MOST_HEAD_DIM = 256;  // kernels/cpu/attention.py keeps to it

// What is read where nobody looks: an unwritten slot may hold anything, even NaN.
alignas(64) const char NOTHING[MOST_HEAD_DIM * sizeof(float)] = {};

// Where the positions of a tile lie in the pool, in bytes; -1: nobody looks at it.
struct Places {
  int64_t offsets[TILE];

  const char* row(const char* base, int key) const {
    return offsets[key] < 0 ? NOTHING : base + offsets[key];
  }
};

// Positions `start` .. `start + TILE`, of which `low` .. `high` are looked at.
inline void find_places(const int64_t* table, int64_t block_size, int64_t slot_bytes, int64_t start,
                        int64_t low, int64_t high, Places* places) {
  const int64_t first = low > start ? low : start;
  const int64_t stop = high < start + TILE ? high : start + TILE;
  for (int i = 0; i < TILE; i++) places->offsets[i] = -1;
  for (int64_t p = first; p < stop;) {
    const int64_t block = p / block_size, end = (block + 1) * block_size;
    int64_t offset = (table[block] * block_size + p - block * block_size) * slot_bytes;
    for (; p < stop && p < end; p++, offset += slot_bytes) places->offsets[p - start] = offset;
  }
}

// Fetches a tile's keys and then its values, so that they are there when their turn comes: in the
// order of memory, and a few lines at a time between instructions that compute. A processor drops
// most of what it is asked for at once, or waits.
class Fetcher {
 public:
  // Nothing to fetch.
  Fetcher() = default;
  // `row_bytes`: of a position, from `keys` and from `values` on.
  Fetcher(const Places* places, const char* keys, const char* values, int64_t row_bytes)
      : places_(places), base_(keys), values_(values), row_bytes_(row_bytes) {
    begin_row();
  }

  // Into the second cache: tiles are more than the first one holds.
  template <int LINES>
  void fetch() {
#pragma GCC unroll 8
    for (int i = 0; places_ && i < LINES; i += 2) {
      _mm_prefetch(at_, _MM_HINT_T1);
      _mm_prefetch(at_ + 64, _MM_HINT_T1);
      at_ += 128;
      if (at_ >= end_) end_row();
    }
  }

 private:
  void begin_row() {
    at_ = places_->row(base_, key_);
    end_ = at_ + row_bytes_;
  }
  void end_row() {
    if (++key_ < TILE) return begin_row();
    key_ = 0;
    if (base_ == values_)
      places_ = nullptr;
    else
      base_ = values_, begin_row();
  }

  const Places* places_ = nullptr;
  const char *base_ = nullptr, *values_ = nullptr, *at_ = nullptr, *end_ = nullptr;
  int64_t row_bytes_ = 0;
  int key_ = 0;
};

// Lines at a time: a tile has as many pieces, for 16 bytes of 16 keys and for 64 columns of a step
// of values, that all of the next are fetched.
constexpr int FETCHED = 4;

#if defined(__AVX512F__)

// 16 bytes of each of four rows. Loads and blends: shuffles are what there are too many of.
inline Ints four_rows(const char* const* rows, int64_t at) {
  auto part = [=](int i) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[4 * i] + at));
  };
  Ints x = _mm512_castsi128_si512(part(0));
  x = _mm512_mask_broadcast_i32x4(x, 0x00F0, part(1));
  x = _mm512_mask_broadcast_i32x4(x, 0x0F00, part(2));
  return _mm512_mask_broadcast_i32x4(x, 0xF000, part(3));
}

// Four times four bytes of each of 16 rows, from byte `at` on: the first of all, the second ...
inline void turn_rows(const char* const* rows, int64_t at, Ints* to) {
  Ints a = four_rows(rows, at), b = four_rows(rows + 1, at);
  Ints c = four_rows(rows + 2, at), d = four_rows(rows + 3, at);
  Ints ab = _mm512_unpacklo_epi32(a, b), cd = _mm512_unpacklo_epi32(c, d);
  to[0] = _mm512_unpacklo_epi64(ab, cd);
  to[1] = _mm512_unpackhi_epi64(ab, cd);
  ab = _mm512_unpackhi_epi32(a, b), cd = _mm512_unpackhi_epi32(c, d);
  to[2] = _mm512_unpacklo_epi64(ab, cd);
  to[3] = _mm512_unpackhi_epi64(ab, cd);
}

// The same -> four lines of `to`, TILE * 4 bytes apart.
inline void turn_rows(const char* const* rows, int64_t at, char* to) {
  Ints turned[4];
  turn_rows(rows, at, turned);
  for (int k = 0; k < 4; k++) _mm512_store_si512(to + k * TILE * 4, turned[k]);
}

// 32 columns of two bf16 rows -> pairs.
inline void pair_rows(const char* first, const char* second, Ints* to) {
  Ints a = load_ints(first), b = load_ints(second);
  // In each 128 bits four pairs of the low or of the high halves: put in order afterwards.
  Ints low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);
  const Ints begin = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
  const Ints end = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  to[0] = _mm512_permutex2var_epi64(low, begin, high);
  to[1] = _mm512_permutex2var_epi64(low, end, high);
}

inline void pair_rows(const char* first, const char* second, char* to) {
  Ints pairs[2];
  pair_rows(first, second, pairs);
  _mm512_store_si512(to, pairs[0]);
  _mm512_store_si512(to + 64, pairs[1]);
}

#else

inline void turn_rows(const char* const* rows, int64_t at, char* to) {
  for (int k = 0; k < 4; k++)
    for (int i = 0; i < 16; i++) memcpy(to + (k * TILE + i) * 4, rows[i] + at + k * 4, 4);
}

inline void pair_rows(const char* first, const char* second, char* to) {
  for (int i = 0; i < 32; i++) {
    memcpy(to + i * 4, first + i * 2, 2);
    memcpy(to + i * 4 + 2, second + i * 2, 2);
  }
}

#endif

// Keys as columns: `row_bytes` / 4 steps over the head's dimensions, each of TILE * 4 bytes.
inline void pack_keys(const char* base, const Places& places, int64_t row_bytes, Fetcher* fetcher,
                      char* to) {
  for (int key = 0; key < TILE; key += 16, to += 16 * 4) {
    const char* rows[16];
    for (int i = 0; i < 16; i++) rows[i] = places.row(base, key + i);
    for (int64_t at = 0; at < row_bytes; at += 16) {
      fetcher->fetch<FETCHED>();
      turn_rows(rows, at, to + at * TILE);
    }
  }
}

// Dimensions as columns, in blocks of BLOCK of them; steps are pairs of keys.
inline void pack_values(const char* base, const Places& places, int64_t head_dim, Fetcher* fetcher,
                        const bf16*, char* to) {
  const char* rows[TILE];
  for (int key = 0; key < TILE; key++) rows[key] = places.row(base, key);
  for (int64_t column = 0; column < head_dim; column += BLOCK) {
    const bool is_whole = head_dim - column >= BLOCK;
    for (int key = 0; key < TILE; key += 2, to += is_whole ? 256 : 128) {
      const char *first = rows[key] + column * 2, *second = rows[key + 1] + column * 2;
      fetcher->fetch<FETCHED>();
      pair_rows(first, second, to);
      if (is_whole) pair_rows(first + 64, second + 64, to + 128);
    }
  }
}

// As above; steps are keys.
inline void pack_values(const char* base, const Places& places, int64_t head_dim, Fetcher* fetcher,
                        const float*, char* to) {
  const char* rows[TILE];
  for (int key = 0; key < TILE; key++) rows[key] = places.row(base, key);
  for (int64_t column = 0; column < head_dim; column += BLOCK) {
    const int64_t bytes = head_dim - column >= BLOCK ? 256 : 128;
    for (int key = 0; key < TILE; key++, to += bytes) {
      fetcher->fetch<FETCHED>();
      memcpy(to, rows[key] + column * 4, bytes);
    }
  }
}

}  // namespace
