// Work shared by the threads of one team, which lasts as long as the process.
#pragma once

#include <stdint.h>

// `body(data)` on the caller's thread and on up to `num_threads` - 1 others that happen to be free;
// returns when all that began it have ended it.
void run_team(void (*body)(void*), void* data, int num_threads);

namespace {

template <class Body>
struct Items {
  Body* body;
  int64_t count;
  int64_t next;
};

template <class Body>
void take_items(void* data) {
  auto* items = static_cast<Items<Body>*>(data);
  for (;;) {
    int64_t i = __atomic_fetch_add(&items->next, 1, __ATOMIC_RELAXED);
    if (i >= items->count) return;
    (*items->body)(i);
  }
}

// body(i) for each i below `count`, in any order. Threads take items as they get free: one that
// the system interrupts delays nothing but its own item.
template <class Body>
void for_each(int64_t count, int num_threads, Body body) {
  if (num_threads > count) num_threads = static_cast<int>(count);
  if (num_threads <= 1) {
    for (int64_t i = 0; i < count; i++) body(i);
    return;
  }
  Items<Body> items{&body, count, 0};
  run_team(take_items<Body>, &items, num_threads);
}

// body(first, stop) for runs of `size` that make up 0 .. `count`; the last may be shorter.
template <class Body>
void for_each_run(int64_t count, int64_t size, int num_threads, Body body) {
  for_each((count + size - 1) / size, num_threads, [&](int64_t run) {
    body(run * size, (run + 1) * size < count ? (run + 1) * size : count);
  });
}

// The last of `pieces` that begins at `item` or before it; `first` tells where each begins.
template <class Piece>
const Piece& piece_at(const Piece* pieces, int64_t count, int64_t Piece::*first, int64_t item) {
  int64_t low = 0, high = count - 1;
  while (low < high) {
    int64_t middle = (low + high + 1) / 2;
    if (pieces[middle].*first <= item)
      low = middle;
    else
      high = middle - 1;
  }
  return pieces[low];
}

}  // namespace
