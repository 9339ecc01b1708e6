// Causal attention over paged keys and values: decode and prefill by one algorithm.
//
// The online softmax of FlashAttention (Dao et al., 2022) over key tiles at fixed positions, with
// keys cut at fixed positions too, as in its "flash-decoding": split i of a sequence holds
// positions [i SPLIT, (i + 1) SPLIT). Each split starts afresh, and the splits that a row sees are
// merged in ascending order by one formula, wherever they were computed. Of a tile all rows that
// see any key of it take in all 64, those that they may not see with a weight of 0; the others do
// not take part. So a row's bits depend on its query, its position and its keys alone.
#pragma once

#include "api.h"
#include "few_rows.h"
#include "parallel.h"
#include "scratch.h"
#include "softmax_rows.h"

namespace {

constexpr int64_t SPLIT = 1024;
// Query tokens times the heads that share a kv head: while a packed tile is in the cache.
constexpr int64_t QUERY_ROWS = 96;

// Query tokens of one sequence and a range of kv heads. Row r of a head is token r / group.
struct Item {
  int64_t sequence, token, tokens, head, heads;
  int64_t position;  // of its first token
  int64_t group, window;
  int64_t first_split, splits;  // those that a row of it sees
  int64_t first_part;           // its parts are done one by one, in any order
  float* records;               // of its splits [splits, heads, rows], or null: it has one part

  int64_t rows() const { return tokens * group; }
  int64_t num_parts() const { return records ? splits : 1; }
  // The positions that a row sees.
  int64_t high(int64_t row) const { return position + row / group + 1; }
  int64_t low(int64_t row) const { return high(row) > window ? high(row) - window : 0; }
  // Its splits, counted from the item's first.
  int64_t row_split(int64_t row) const { return low(row) / SPLIT - first_split; }
  int64_t last_row_split(int64_t row) const { return (high(row) - 1) / SPLIT - first_split; }
};

// A thread's memory for one item.
template <class T>
struct Desk {
  char *keys, *values;
  T *queries, *weights;
  float *keep, *state, *merged;

  bool prepare(int64_t most_rows, int64_t most_records, int64_t head_dim) {
    static thread_local Scratch kept;
    const int64_t tile = TILE * head_dim * sizeof(T);
    const int64_t size[] = {tile, tile, most_records * head_dim * static_cast<int64_t>(sizeof(T)),
                            most_rows * TILE * static_cast<int64_t>(sizeof(T)), most_rows * 4,
                            most_records * record_floats(head_dim) * 4,
                            most_records * record_floats(head_dim) * 4};
    int64_t at[8] = {};
    for (int i = 0; i < 7; i++) at[i + 1] = at[i] + (size[i] + 63) / 64 * 64;
    char* base = kept.take<char>(at[7]);
    if (!base) return false;
    keys = base, values = base + at[1];
    queries = reinterpret_cast<T*>(base + at[2]), weights = reinterpret_cast<T*>(base + at[3]);
    keep = reinterpret_cast<float*>(base + at[4]), state = reinterpret_cast<float*>(base + at[5]);
    merged = reinterpret_cast<float*>(base + at[6]);
    return true;
  }
};

template <class T>
void copy_queries(const AttentionCall& call, const Item& item, T* to) {
  const int64_t size = item.group * call.head_dim;
  for (int64_t head = item.head; head < item.head + item.heads; head++)
    for (int64_t t = item.token; t < item.token + item.tokens; t++, to += size)
      memcpy(to, static_cast<const T*>(call.q) + t * call.q_stride + head * size, size * sizeof(T));
}

// A tile as rows of one kv head see it.
struct Tile {
  int64_t start;
  const char *keys, *values;  // of the head, in the pool's first slot
  const Places* places;
  Fetcher* fetcher;  // of the next tile
};

// What a tile's scores do to `count` rows from `row` on: new weights, and what is kept.
template <class T>
void take_scores(const AttentionCall& call, const Item& item, const Tile& tile, int64_t row,
                 int count, float* scores, const Desk<T>& desk, float* state) {
  const int64_t stride = record_floats(call.head_dim);
  const float scale = call.scale * LOG2_E;
  for (int i = 0; i < count; i++)
    hide_keys(scores + i * TILE, item.low(row + i) - tile.start, item.high(row + i) - tile.start);
  raise_maxima(scores, count, scale, state + row * stride, stride, desk.keep + row);
  for (int i = 0; i < count; i++)
    weigh_keys(scores + i * TILE, scale, desk.keep[row + i], state + (row + i) * stride,
               desk.weights + (row + i) * TILE);
}

template <class T>
void take_values(const AttentionCall& call, int64_t row, int count, int64_t column, int width,
                 const float* sums, const Desk<T>& desk, float* state) {
  const int64_t stride = record_floats(call.head_dim);
  for (int i = 0; i < count; i++)
    add_values(sums + i * BLOCK, desk.keep[row + i], width,
               state + (row + i) * stride + VALUES + column);
}

// Rows `first` .. `stop` take in a tile that is packed for them.
template <class Step>
void add_tile(const AttentionCall& call, const Item& item, const Tile& tile, int64_t first,
              int64_t stop, const typename Step::Element* queries,
              const Desk<typename Step::Element>& desk, float* state) {
  using T = typename Step::Element;
  constexpr int64_t SIZE = sizeof(T), ELEMENTS = 4 / SIZE;
  const int64_t head_dim = call.head_dim;
  pack_keys(tile.keys, *tile.places, head_dim * SIZE, tile.fetcher, desk.keys);
  pack_values(tile.values, *tile.places, head_dim, tile.fetcher, queries, desk.values);
  multiply_block<Step>({reinterpret_cast<const char*>(queries), head_dim * SIZE, nullptr}, first,
                       stop, {desk.keys, head_dim / ELEMENTS, TILE},
                       [&](int64_t row, int count, float* scores) {
                         take_scores(call, item, tile, row, count, scores, desk, state);
                       });
  for (int64_t column = 0; column < head_dim; column += BLOCK) {
    const int width = head_dim - column < BLOCK ? static_cast<int>(head_dim - column) : BLOCK;
    multiply_block<Step>({reinterpret_cast<const char*>(desk.weights), TILE * SIZE, nullptr}, first,
                         stop, {desk.values + column * TILE * SIZE, TILE / ELEMENTS, width},
                         [&](int64_t row, int count, const float* sums) {
                           take_values(call, row, count, column, width, sums, desk, state);
                         });
  }
}

#if defined(__AVX512F__)
// The same for few rows.
template <class Step>
void add_tile_to_few(const AttentionCall& call, const Item& item, const Tile& tile, int64_t first,
                     int count, const typename Step::Element* queries,
                     const Desk<typename Step::Element>& desk, float* state) {
  const int64_t head_dim = call.head_dim, row_bytes = head_dim * sizeof(typename Step::Element);
  alignas(64) float scores[MOST_ROWS * TILE];
  score_few<Step>(queries + first * head_dim, count, tile.keys, *tile.places, row_bytes,
                  tile.fetcher, scores);
  take_scores(call, item, tile, first, count, scores, desk, state);
  weigh_few<Step>(desk.weights + first * TILE, count, tile.values, *tile.places, head_dim,
                  tile.fetcher, [&](int64_t column, int width, const float* sums) {
                    take_values(call, first, count, column, width, sums, desk, state);
                  });
}
#endif

// All rows of the item take in the keys of one of its splits -> `state` [heads, rows] records.
template <class Step>
void attend_split(const AttentionCall& call, const Item& item, int64_t split,
                  const Desk<typename Step::Element>& desk, float* state) {
  constexpr int64_t SIZE = sizeof(typename Step::Element);
  const int64_t rows = item.rows(), head_bytes = call.head_dim * SIZE;
  const int64_t stride = record_floats(call.head_dim), slot_bytes = call.kv_heads * head_bytes;
  const int64_t low = item.low(0), high = item.high(rows - 1);
  const int64_t begin = (item.first_split + split) * SPLIT;
  const int64_t end = high < begin + SPLIT ? high : begin + SPLIT;
  const int64_t* table = call.tables + item.sequence * call.table_stride;
  for (int64_t i = 0; i < item.heads * rows; i++) clear_record(state + i * stride, call.head_dim);
  Places places[2];
  auto find = [&](int64_t start, Places* to) {
    find_places(table, call.block_size, slot_bytes, start, low, high, to);
  };
  int64_t start = low > begin ? low / TILE * TILE : begin;
  find(start, &places[0]);
  for (int turn = 0; start < end; start += TILE, turn ^= 1) {
    const Places* next = start + TILE < end ? &places[turn ^ 1] : nullptr;
    if (next) find(start + TILE, &places[turn ^ 1]);
    const int64_t before = start - item.position;
    const int64_t first = before > 0 ? before * item.group : 0;
    const int64_t past = before + TILE - 1 + item.window;
    const int64_t stop = past < item.tokens ? past * item.group : rows;
    const char* keys = static_cast<const char*>(call.keys) + item.head * head_bytes;
    const char* values = static_cast<const char*>(call.values) + item.head * head_bytes;
    Fetcher fetcher(next, keys, values, item.heads * head_bytes);
    for (int64_t head = 0; head < item.heads; head++) {
      const Tile tile{start, keys + head * head_bytes, values + head * head_bytes, &places[turn],
                      &fetcher};
      const auto* queries = desk.queries + head * rows * call.head_dim;
      float* records = state + head * rows * stride;
#if defined(__AVX512F__)
      if (is_few<Step>(stop - first)) {
        add_tile_to_few<Step>(call, item, tile, first, static_cast<int>(stop - first), queries,
                              desk, records);
        continue;
      }
#endif
      add_tile<Step>(call, item, tile, first, stop, queries, desk, records);
    }
  }
  for (int64_t i = 0; i < item.heads * rows; i++) close_record(state + i * stride);
}

template <class T>
void store_results(const AttentionCall& call, const Item& item, const float* state) {
  const int64_t head_dim = call.head_dim, heads = call.kv_heads * item.group;
  for (int64_t head = item.head; head < item.head + item.heads; head++)
    for (int64_t row = 0; row < item.rows(); row++, state += record_floats(head_dim)) {
      const int64_t token = item.token + row / item.group;
      T* to = static_cast<T*>(call.out) +
              (token * heads + head * item.group + row % item.group) * head_dim;
      store_result(state, call.value_scale, head_dim, to);
    }
}

// One part: one split, or all of them.
template <class Step>
bool attend(const AttentionCall& call, const Item& item, int64_t part, int64_t most_rows,
            int64_t most_records) {
  using T = typename Step::Element;
  const int64_t stride = record_floats(call.head_dim), rows = item.rows();
  const int64_t size = item.heads * rows * stride;
  Desk<T> desk;
  if (!desk.prepare(most_rows, most_records, call.head_dim)) return false;
  copy_queries(call, item, desk.queries);
  if (item.records) {
    attend_split<Step>(call, item, part, desk, item.records + part * size);
    return true;
  }
  for (int64_t split = 0; split < item.splits; split++) {
    attend_split<Step>(call, item, split, desk, item.splits == 1 ? desk.merged : desk.state);
    for (int64_t i = 0; item.splits > 1 && i < item.heads * rows; i++)
      if (item.row_split(i % rows) <= split && split <= item.last_row_split(i % rows))
        merge_record(desk.merged + i * stride, desk.state + i * stride,
                     split == item.row_split(i % rows), call.head_dim);
  }
  store_results<T>(call, item, desk.merged);
  return true;
}

// What the parts of an item left.
template <class T>
void merge_parts(const AttentionCall& call, const Item& item) {
  const int64_t stride = record_floats(call.head_dim), rows = item.rows();
  const int64_t size = item.heads * rows * stride;
  for (int64_t i = 0; i < item.heads * rows; i++) {
    const int64_t first = item.row_split(i % rows);
    for (int64_t split = first; split <= item.last_row_split(i % rows); split++)
      merge_record(item.records + i * stride, item.records + split * size + i * stride,
                   split == first, call.head_dim);
  }
  store_results<T>(call, item, item.records);
}

// Calls visit(item) for all query tokens and kv heads, what takes longest first within a sequence;
// where its sequence has few tokens an item has all kv heads if `together`, so that memory is
// read as it lies.
template <class Visit>
void each_item(const AttentionCall& call, bool together, Visit visit) {
  const int64_t group = call.heads / call.kv_heads;
  const int64_t step = group < QUERY_ROWS ? QUERY_ROWS / group : 1;
  for (int64_t s = 0; s < call.sequences; s++) {
    const int64_t begin = call.query_starts[s], tokens = call.query_starts[s + 1] - begin;
    if (!call.context_lens[s]) continue;
    const bool is_few = tokens <= step;
    const int64_t heads = is_few && together ? call.kv_heads : 1;
    for (int64_t first = (tokens - 1) / step * step; first >= 0; first -= step)
      for (int64_t head = 0; head < call.kv_heads; head += heads) {
        Item item{};
        item.sequence = s, item.token = begin + first;
        item.tokens = tokens - first < step ? tokens - first : step;
        item.head = head, item.heads = heads;
        item.position = call.context_lens[s] - tokens + first;
        item.group = group, item.window = call.window;
        item.first_split = item.low(0) / SPLIT;
        item.splits = item.last_row_split(item.rows() - 1) + 1;
        visit(item, is_few && item.splits > 1);
      }
  }
}

inline const Item& item_of(const Item* items, int64_t count, int64_t part) {
  int64_t low = 0, high = count - 1;
  while (low < high) {
    int64_t middle = (low + high + 1) / 2;
    if (items[middle].first_part <= part)
      low = middle;
    else
      high = middle - 1;
  }
  return items[low];
}

template <class Step>
int run_attention(const AttentionCall& call) {
  using T = typename Step::Element;
  int64_t count, parts, records, most_rows, most_records;
  bool together = true;
  auto measure = [&] {
    count = parts = records = most_rows = most_records = 0;
    each_item(call, together, [&](const Item& item, bool is_cut) {
      const int64_t rows = item.rows(), size = item.heads * rows;
      count++, parts += is_cut ? item.splits : 1, records += is_cut ? item.splits * size : 0;
      most_rows = rows > most_rows ? rows : most_rows;
      most_records = size > most_records ? size : most_records;
    });
  };
  measure();
  // Not enough to share.
  if (parts < 4 * call.threads) together = false, measure();
  const int64_t stride = record_floats(call.head_dim);
  static thread_local Scratch kept_items, kept_records;
  Item* items = kept_items.take<Item>(count);
  float* at = kept_records.take<float>(records * stride);
  if ((count && !items) || (records && !at)) return MOE_SERVE_NO_MEMORY;
  int64_t next = 0, first_part = 0;
  each_item(call, together, [&](Item item, bool is_cut) {
    item.first_part = first_part;
    if (is_cut) item.records = at, at += item.splits * item.heads * item.rows() * stride;
    first_part += item.num_parts();
    items[next++] = item;
  });
  bool has_failed = false;
  for_each(parts, call.threads, [&](int64_t part) {
    const Item& item = item_of(items, count, part);
    if (!attend<Step>(call, item, part - item.first_part, most_rows, most_records))
      __atomic_store_n(&has_failed, true, __ATOMIC_RELAXED);
  });
  if (records)
    for_each(count, call.threads, [&](int64_t i) {
      if (items[i].records) merge_parts<T>(call, items[i]);
    });
  return has_failed ? MOE_SERVE_NO_MEMORY : MOE_SERVE_DONE;
}

}  // namespace
