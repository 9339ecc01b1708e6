// The collectives, each made of rounds (layout.h). Shapes: S ranks of the group.
#pragma once

#include <algorithm>

#include "copying.h"
#include "sum.h"
#include "waiting.h"

enum Operation : uint32_t { ALL_GATHER, GATHER, ALL_TO_ALL, REDUCE_SCATTER, ALL_REDUCE };

// From here on, sums are shared out over the ranks, at the price of a second round.
constexpr size_t SHARED_SUM_BYTES = 32768;

// What of [0, total) a round moves: at most `most` from `start`.
inline size_t part_of(size_t total, size_t start, size_t most) {
  return start < total ? std::min(total - start, most) : 0;
}

// Of a slot that is divided among the others: what one of them gets, and where it lies.
inline size_t quota(const Group& group) {
  return group.slot_bytes / (group.size - 1) / 64 * 64;
}
inline char* slot_for(Group& group, int from, int to) {
  return group.slot(from) + (to < from ? to : to - 1) * quota(group);
}

// Each rank's x to wherever outs[rank] points to; outs null: this rank wants nothing.
inline void gather(
    Group& group, uint32_t operation, char* const* outs, const char* x, size_t bytes) {
  const Call call = {operation, 0, bytes, 0};
  for (size_t start = 0; start == 0 || start < bytes; start += group.slot_bytes) {
    const size_t part = part_of(bytes, start, group.slot_bytes);
    group.round++;
    copy_past_caches(group.slot(group.rank), x + start, part);
    group.post(call);
    if (outs) copy_result(outs[group.rank] + start, x + start, part, bytes * group.size);
    for (int i = 0; i < group.size - 1; i++) {
      const int from = group.other(i);
      group.await(from, call);
      if (outs) copy_result(outs[from] + start, group.slot(from), part, bytes * group.size);
    }
  }
}

struct Exchange {
  char* out;
  const char* x;
  // Bytes by rank.
  const uint64_t* received;
  const uint64_t* sent;
  // Where a rank's begin in `out` and in `x`.
  uint64_t out_starts[MOST_RANKS];
  uint64_t x_starts[MOST_RANKS];
};

inline uint64_t rounds_of(const Group& group, const Exchange& exchange) {
  uint64_t most = 1;
  for (int to = 0; to < group.size; to++) {
    const uint64_t bytes = to == group.rank ? 0 : exchange.sent[to];
    most = std::max<uint64_t>(most, (bytes + quota(group) - 1) / quota(group));
  }
  return most;
}

inline void fill_slots(Group& group, const Exchange& exchange, size_t start) {
  for (int i = 0; i < group.size - 1; i++) {
    const int to = group.other(i);
    const size_t part = part_of(exchange.sent[to], start, quota(group));
    const char* x = exchange.x + exchange.x_starts[to];
    copy_past_caches(slot_for(group, group.rank, to), x + start, part);
  }
}

inline void all_to_all(Group& group, Exchange& exchange) {
  uint64_t out_start = 0, x_start = 0;
  for (int i = 0; i < group.size; i++) {
    exchange.out_starts[i] = out_start, exchange.x_starts[i] = x_start;
    out_start += exchange.received[i], x_start += exchange.sent[i];
  }
  const Call call = {ALL_TO_ALL, 0, 0, rounds_of(group, exchange)};
  uint64_t num_rounds = call.rounds;
  for (uint64_t done = 0; done < num_rounds; done++) {
    const size_t start = done * quota(group);
    group.round++;
    fill_slots(group, exchange, start);
    std::copy_n(exchange.sent, group.size, group.sent(group.rank));
    group.post(call);
    if (!done) {
      copy_result(exchange.out + exchange.out_starts[group.rank],
                  exchange.x + exchange.x_starts[group.rank], exchange.sent[group.rank], out_start);
    }
    for (int i = 0; i < group.size - 1; i++) {
      const int from = group.other(i);
      group.await(from, call);
      if (group.sent(from)[group.rank] != exchange.received[from]) {
        group.theirs = {ALL_TO_ALL, 0, group.sent(from)[group.rank], 0};
        group.fail(MISMATCH, from);
      }
      num_rounds = std::max(num_rounds, group.call(from).rounds);
      const size_t part = part_of(exchange.received[from], start, quota(group));
      copy_result(exchange.out + exchange.out_starts[from] + start,
                  slot_for(group, from, group.rank), part, out_start);
    }
  }
}

// One round of a sum: of all ranks' parts for this one, of which `own` stayed here.
inline void add_round(
    Group& group, const Call& call, char* out, const char* own, size_t bytes) {
  const void* parts[MOST_RANKS];
  group.await_all(call);
  for (int from = 0; from < group.size; from++) {
    parts[from] = from == group.rank ? own : slot_for(group, from, group.rank);
  }
  add_in_order(call.number, out, parts, group.size, bytes / bytes_of(call.number));
}

// `bytes`: of out, so that x has S times as many.
inline void reduce_scatter(Group& group, uint32_t number, char* out, const char* x, size_t bytes) {
  const Call call = {REDUCE_SCATTER, number, bytes, 0};
  for (size_t start = 0; start == 0 || start < bytes; start += quota(group)) {
    const size_t part = part_of(bytes, start, quota(group));
    group.round++;
    for (int i = 0; i < group.size - 1; i++) {
      const int to = group.other(i);
      copy_past_caches(slot_for(group, group.rank, to), x + to * bytes + start, part);
    }
    group.post(call);
    add_round(group, call, out + start, x + group.rank * bytes + start, part);
  }
}

// Every rank adds up all of it.
inline void all_reduce_short(Group& group, uint32_t number, char* x, size_t bytes) {
  const Call call = {ALL_REDUCE, number, bytes, 0};
  const void* parts[MOST_RANKS];
  group.round++;
  copy_past_caches(group.slot(group.rank), x, bytes);
  group.post(call);
  group.await_all(call);
  for (int from = 0; from < group.size; from++) parts[from] = group.slot(from);
  add_in_order(number, x, parts, group.size, bytes / bytes_of(number));
}

// Every rank adds up its share of a piece, then all exchange these.
inline void all_reduce_piece(Group& group, const Call& call, char* x, size_t bytes) {
  const size_t share = (bytes / group.size + 63) / 64 * 64 + 64;
  const size_t own_start = std::min(group.rank * share, bytes);
  const size_t own_bytes = part_of(bytes, own_start, share);
  group.round++;
  for (int i = 0; i < group.size - 1; i++) {
    const int to = group.other(i);
    const size_t part = part_of(bytes, to * share, share);
    copy_past_caches(slot_for(group, group.rank, to), x + to * share, part);
  }
  group.post(call);
  add_round(group, call, x + own_start, x + own_start, own_bytes);
  group.round++;
  copy_past_caches(group.slot(group.rank), x + own_start, own_bytes);
  group.post(call);
  for (int i = 0; i < group.size - 1; i++) {
    const int from = group.other(i);
    group.await(from, call);
    const size_t part = part_of(bytes, from * share, share);
    copy_result(x + from * share, group.slot(from), part, call.bytes);
  }
}

inline void all_reduce(Group& group, uint32_t number, char* x, size_t bytes) {
  if (bytes < SHARED_SUM_BYTES && bytes <= group.slot_bytes) {
    return all_reduce_short(group, number, x, bytes);
  }
  const Call call = {ALL_REDUCE, number, bytes, 0};
  // A share with its rounding up must fit what a slot has for one rank.
  const size_t most = (quota(group) - 128) * group.size / 64 * 64;
  for (size_t start = 0; start < bytes; start += most) {
    all_reduce_piece(group, call, x + start, part_of(bytes, start, most));
  }
}
