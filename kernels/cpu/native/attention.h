// Causal attention over paged keys and values: decode and prefill by one algorithm.
//
// The online softmax of FlashAttention (Dao et al., 2022) over key tiles at fixed positions, with
// keys cut at fixed positions too, as in its "flash-decoding": split i of a sequence holds
// positions [i SPLIT, (i + 1) SPLIT). Each split starts afresh, and the splits that a row sees are
// merged in ascending order by one formula, wherever they were computed. Of a tile all rows that
// see any key of it take in all 64, those that they may not see with a weight of 0; the others do
// not take part. So a row's bits depend on its query, its position and its keys alone.
#pragma once

#include "attention_items.h"
#include "few_rows.h"
#include "parallel.h"
#include "scratch.h"
#include "softmax_rows.h"

namespace {

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

// Rows `first` .. `stop` take in a tile, which is packed for them.
template <class Step>
void add_tile_to_many(const AttentionCall& call, const Item& item, const Tile& tile, int64_t first,
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
// As it lies, for few rows.
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

template <class Step>
void add_tile(const AttentionCall& call, const Item& item, const Tile& tile, int64_t first,
              int64_t stop, const typename Step::Element* queries,
              const Desk<typename Step::Element>& desk, float* state) {
#if defined(__AVX512F__)
  if (is_few<Step>(stop - first))
    return add_tile_to_few<Step>(call, item, tile, first, static_cast<int>(stop - first), queries,
                                 desk, state);
#endif
  add_tile_to_many<Step>(call, item, tile, first, stop, queries, desk, state);
}

// Where a tile of an item's sequence lies -> `places`, and what fetches it.
inline Fetcher fetcher_of(const AttentionCall& call, const Item& item, const Span& span,
                          int64_t start, int64_t head_bytes, Places* places) {
  find_places(call.tables + item.sequence * call.table_stride, call.block_size,
              call.kv_heads * head_bytes, start, span.low, span.high, places);
  const int64_t at = item.head * head_bytes;
  return {places, static_cast<const char*>(call.keys) + at,
          static_cast<const char*>(call.values) + at, item.heads * head_bytes};
}

// All rows of the item take in the keys of a split of it -> `state` [heads, rows] records. Then
// the first tile of the part that comes after it is fetched.
template <class Step>
void attend_split(const AttentionCall& call, const Part& part, const Part& after,
                  const Desk<typename Step::Element>& desk, float* state) {
  constexpr int64_t SIZE = sizeof(typename Step::Element);
  const Item& item = *part.item;
  const int64_t rows = item.rows(), head_bytes = call.head_dim * SIZE;
  const int64_t stride = record_floats(call.head_dim);
  const Span span(item, part.split);
  for (int64_t i = 0; i < item.heads * rows; i++) clear_record(state + i * stride, call.head_dim);
  Places places[2];
  fetcher_of(call, item, span, span.start, head_bytes, &places[0]);
  int turn = 0;
  for (int64_t start = span.start; start < span.end; start += TILE, turn ^= 1) {
    Fetcher fetcher;
    if (start + TILE < span.end) {
      fetcher = fetcher_of(call, item, span, start + TILE, head_bytes, &places[turn ^ 1]);
    } else if (after.item) {
      const Span next(*after.item, after.split);
      fetcher = fetcher_of(call, *after.item, next, next.start, head_bytes, &places[turn ^ 1]);
    }
    const int64_t before = start - item.position;
    const int64_t first = before > 0 ? before * item.group : 0;
    const int64_t past = before + TILE - 1 + item.window;
    const int64_t stop = past < item.tokens ? past * item.group : rows;
    for (int64_t head = 0; head < item.heads; head++) {
      const int64_t at = (item.head + head) * head_bytes;
      const Tile tile{start, static_cast<const char*>(call.keys) + at,
                      static_cast<const char*>(call.values) + at, &places[turn], &fetcher};
      add_tile<Step>(call, item, tile, first, stop, desk.queries + head * rows * call.head_dim,
                     desk, state + head * rows * stride);
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
bool attend(const AttentionCall& call, const Part& part, const Part& after, int64_t most_rows,
            int64_t most_records) {
  using T = typename Step::Element;
  const Item& item = *part.item;
  const int64_t stride = record_floats(call.head_dim), rows = item.rows();
  const int64_t size = item.heads * rows * stride;
  Desk<T> desk;
  if (!desk.prepare(most_rows, most_records, call.head_dim)) return false;
  copy_queries(call, item, desk.queries);
  if (item.records) {
    attend_split<Step>(call, part, after, desk, item.records + part.split * size);
    return true;
  }
  for (int64_t split = 0; split < item.splits; split++) {
    const Part next = split + 1 < item.splits ? Part{&item, split + 1} : after;
    attend_split<Step>(call, {&item, split}, next, desk,
                       item.splits == 1 ? desk.merged : desk.state);
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

// What all items of a call need.
struct Plan {
  int64_t items = 0, parts = 0, records = 0, most_rows = 0, most_records = 0;

  Plan(const AttentionCall& call, bool together) {
    each_item(call, together, [&](const Item& item, bool is_cut) {
      const int64_t rows = item.rows(), size = item.heads * rows;
      items++, parts += is_cut ? item.splits : 1, records += is_cut ? item.splits * size : 0;
      most_rows = rows > most_rows ? rows : most_rows;
      most_records = size > most_records ? size : most_records;
    });
  }
};

template <class Step>
int run_attention(const AttentionCall& call) {
  Plan plan(call, true);
  // Where there is too little to share, heads are work of their own.
  const bool together = plan.parts >= 4 * call.threads;
  if (!together) plan = Plan(call, false);
  const int64_t stride = record_floats(call.head_dim);
  static thread_local Scratch kept_items, kept_records;
  Item* items = kept_items.take<Item>(plan.items);
  float* records = kept_records.take<float>(plan.records * stride);
  if ((plan.items && !items) || (plan.records && !records)) return MOE_SERVE_NO_MEMORY;
  int64_t next = 0, first_part = 0;
  each_item(call, together, [&](Item item, bool is_cut) {
    item.first_part = first_part;
    if (is_cut) item.records = records, records += item.splits * item.heads * item.rows() * stride;
    first_part += item.num_parts();
    items[next++] = item;
  });
  auto part_of = [&](int64_t number) {
    if (number >= plan.parts) return Part{nullptr, 0};
    const Item& item = piece_at(items, plan.items, &Item::first_part, number);
    return Part{&item, number - item.first_part};
  };
  bool has_failed = false;
  // Threads take turns, more or less: a guess at what is next.
  for_each(plan.parts, call.threads, [&](int64_t i) {
    if (!attend<Step>(call, part_of(i), part_of(i + call.threads), plan.most_rows,
                      plan.most_records))
      __atomic_store_n(&has_failed, true, __ATOMIC_RELAXED);
  });
  if (plan.records)
    for_each(plan.items, call.threads, [&](int64_t i) {
      if (items[i].records) merge_parts<typename Step::Element>(call, items[i]);
    });
  return has_failed ? MOE_SERVE_NO_MEMORY : MOE_SERVE_DONE;
}

}  // namespace
