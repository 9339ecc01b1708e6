// What there is to do in a call of attention, cut into pieces for the threads.
#pragma once

#include "api.h"
#include "key_tiles.h"

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

// One split, and the positions of its keys: tiles from `start` on, before `end`. The rows of the
// item see `low` .. `high`.
struct Span {
  int64_t start, end, low, high;

  Span(const Item& item, int64_t split) : low(item.low(0)), high(item.high(item.rows() - 1)) {
    const int64_t begin = (item.first_split + split) * SPLIT;
    start = low > begin ? low / TILE * TILE : begin;
    end = high < begin + SPLIT ? high : begin + SPLIT;
  }
};

// A split of an item; without an item: none.
struct Part {
  const Item* item;
  int64_t split;
};

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

}  // namespace
