// What the machine can do at most: bytes read, and multiplications of values that stand in registers.
#pragma once

#include "api.h"
#include "gemm.h"
#include "parallel.h"

namespace {

// Reads all of it; the sum is returned so that nothing of it can be left out.
inline float run_read(const LimitCall& call) {
  constexpr int64_t PART = 1 << 20;
  const char* data = static_cast<const char*>(call.data);
  float total = 0.0f;
  for_each(call.bytes / PART, call.threads, [&](int64_t item) {
    const float* at = reinterpret_cast<const float*>(data + item * PART);
    Vec sums[8];
    for (Vec& sum : sums) sum = set1(0.0f);
    for (int64_t i = 0; i < PART / 4; i += 8 * LANES)
      for (int j = 0; j < 8; j++) sums[j] = add(sums[j], load(at + i + j * LANES));
    for (int j = 1; j < 8; j++) sums[0] = add(sums[0], sums[j]);
    float part = sum(sums[0]), before, after;
    __atomic_load(&total, &before, __ATOMIC_RELAXED);
    do after = before + part;
    while (!__atomic_compare_exchange(&total, &before, &after, true, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED));
  });
  return total;
}

// `rounds` times 12 independent sums on each thread; returns the operations done, two for each
// multiplication and addition.
template <class Step>
double run_peak(const LimitCall& call) {
  constexpr int SUMS = 12;
  constexpr int64_t ELEMENTS = 4 / sizeof(typename Step::Element);
  float values[2 * LANES] = {};
  // Else the compiler would see that nothing changes.
  asm volatile("" : : "r"(values) : "memory");
  for_each(call.threads, call.threads, [&](int64_t) {
    Vec sums[SUMS];
    for (Vec& sum : sums) sum = set1(0.0f);
    auto w = Step::weights(load_ints(values));
    auto x = Step::value(reinterpret_cast<const char*>(values), 0);
    for (int64_t i = 0; i < call.rounds; i++) {
#pragma GCC unroll 12
      for (int j = 0; j < SUMS; j++) sums[j] = Step::multiply(sums[j], w, x);
    }
    for (int j = 0; j < SUMS; j++) asm volatile("" : : "x"(sums[j]));
  });
  return 2.0 * SUMS * LANES * ELEMENTS * static_cast<double>(call.rounds) * call.threads;
}

#if defined(MOE_SERVE_AMX)
inline double run_tile_peak(const LimitCall& call) {
  const char values[1024] = {};
  for_each(call.threads, call.threads, [&](int64_t) {
    configure_tiles(16, 16);
    load_tile<4>(values, 64), load_tile<5>(values, 64);
    load_tile<6>(values, 64), load_tile<7>(values, 64);
    zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
    for (int64_t i = 0; i < call.rounds; i++) {
      multiply_tile<0, 4, 6>(), multiply_tile<1, 4, 7>();
      multiply_tile<2, 5, 6>(), multiply_tile<3, 5, 7>();
    }
    release_tiles();
  });
  return 4.0 * 16 * 16 * 32 * 2 * static_cast<double>(call.rounds) * call.threads;
}
#endif

}  // namespace
