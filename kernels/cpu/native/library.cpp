// What the library exports: packing, the choice of an instruction set, and the kernels through it.
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "api.h"
#include "parallel.h"

// Defined are those that the compiler could build.
extern const Kernels kernels_avx2, kernels_avx512, kernels_avx512_bf16, kernels_amx;

namespace {

constexpr int64_t BLOCK = 64;
const Kernels* active = nullptr;

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
[[maybe_unused]] bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
[[maybe_unused]] bool has_avx512_bf16() {
  return has_avx512() && __builtin_cpu_supports("avx512bf16") &&
         __builtin_cpu_supports("avx512vnni");
}

[[maybe_unused]] bool has_amx() {
#if defined(MOE_SERVE_EMULATE_AMX)
  return has_avx512_bf16();
#else
  // Leaf 7: AMX-BF16, AMX-TILE, AMX-INT8.
  unsigned a = 7, b = 0, c = 0, d = 0;
  __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  constexpr unsigned WANTED = 1u << 22 | 1u << 24 | 1u << 25;
  if ((d & WANTED) != WANTED || !has_avx512_bf16()) return false;
  // Linux grants a process its tiles when asked: ARCH_REQ_XCOMP_PERM, XTILEDATA.
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#endif
}

struct Set {
  const char* name;
  const Kernels* kernels;
  bool (*is_there)();
};
// The best first.
const Set SETS[] = {
#if defined(MOE_SERVE_HAS_AMX)
    {"amx", &kernels_amx, has_amx},
#endif
#if defined(MOE_SERVE_HAS_AVX512_BF16)
    {"avx512_bf16", &kernels_avx512_bf16, has_avx512_bf16},
#endif
#if defined(MOE_SERVE_HAS_AVX512)
    {"avx512", &kernels_avx512, has_avx512},
#endif
    {"avx2", &kernels_avx2, has_avx2},
};

// Source column of column `j` of the block at `first`: in paired weights, half of a block are gates
// and half are the ups of the same numbers.
int64_t row_in(int64_t first, int64_t width, int64_t j, int64_t rows, bool paired) {
  if (!paired) return first + j;
  const int64_t half = width / 2;
  return j < half ? first / 2 + j : rows / 2 + first / 2 + (j - half);
}

template <class T>
void move_matrix(const T* from, T* to, int64_t rows, int64_t columns, bool paired, bool unpack) {
  constexpr int64_t ELEMENTS = 4 / sizeof(T);
  for (int64_t first = 0; first < rows; first += BLOCK) {
    const int64_t width = rows - first < BLOCK ? rows - first : BLOCK;
    const int64_t block = first * columns;
    // A few lines of each row at a time, so that they stay in the cache while they are spread.
    for (int64_t start = 0; start < columns; start += 64) {
      const int64_t stop = start + 64 < columns ? start + 64 : columns;
      for (int64_t j = 0; j < width; j++) {
        const int64_t row = row_in(first, width, j, rows, paired) * columns;
        for (int64_t k = start; k < stop; k += ELEMENTS) {
          const int64_t packed = block + k * width + j * ELEMENTS;
          if (unpack)
            memcpy(to + row + k, from + packed, 4);
          else
            memcpy(to + packed, from + row + k, 4);
        }
      }
    }
  }
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Choose an instruction set by name, or the best one for ""; the name of what was chosen, or null
// where this machine has nothing that would do.
const char* moe_serve_choose(const char* name) {
  for (const Set& set : SETS)
    if ((!*name || !strcmp(name, set.name)) && set.is_there()) {
      active = set.kernels;
      return set.name;
    }
  return nullptr;
}

// Matrices [rows, columns], one after the other, into the order that kernels read, or back.
void moe_serve_pack(const void* from, void* to, int64_t matrices, int64_t rows, int64_t columns,
                    int32_t dtype, int32_t paired, int32_t unpack, int32_t threads) {
  const int64_t size = rows * columns;
  for_each(matrices, threads, [=](int64_t m) {
    if (dtype == MOE_SERVE_FLOAT32)
      move_matrix(static_cast<const uint32_t*>(from) + m * size,
                  static_cast<uint32_t*>(to) + m * size, rows, columns, paired, unpack);
    else
      move_matrix(static_cast<const uint16_t*>(from) + m * size,
                  static_cast<uint16_t*>(to) + m * size, rows, columns, paired, unpack);
  });
}

int moe_serve_moe(const MoeCall* call) { return active->moe(call); }
int moe_serve_grouped(const GroupedCall* call) { return active->grouped(call); }
int moe_serve_norm(const NormCall* call) { return active->norm(call); }
int moe_serve_attention_inputs(const AttentionInputsCall* call) {
  return active->attention_inputs(call);
}
int moe_serve_router(const RouterCall* call) { return active->router(call); }
}
#pragma GCC visibility pop
