// Memory that a calling thread keeps between calls: fresh pages would cost more than they hold.
#pragma once

#include <stdint.h>
#include <stdlib.h>

namespace {

// One buffer for each purpose; grows, and is given back when its thread ends.
struct Scratch {
  void* data = nullptr;
  size_t capacity = 0;

  ~Scratch() { free(data); }

  // `count` elements, their contents undefined; null where memory ran out.
  template <class T>
  T* take(int64_t count) {
    size_t size = (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    if (size > capacity) {
      free(data);
      size_t wanted = size + size / 4;
      wanted = (wanted + 63) / 64 * 64;
      data = aligned_alloc(64, wanted);
      capacity = data ? wanted : 0;
    }
    return static_cast<T*>(data);
  }
};

}  // namespace
