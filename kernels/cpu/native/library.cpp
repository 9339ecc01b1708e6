// What the library exports: packing, the choice of an instruction set, and the kernels through it.
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <xmmintrin.h>

#include "api.h"
#include "blocks.h"
#include "parallel.h"

// Defined are those that the compiler could build.
extern const Kernels kernels_avx2, kernels_avx512, kernels_avx512_bf16, kernels_amx;

namespace {

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

// Steps of 4 bytes: rows of a matrix become columns of its blocks, four by four.
struct Layout {
  int64_t rows, steps;
  bool paired;
};

// Row numbers and their places, of the block at `first`: `row[j]` becomes column j.
int64_t rows_of_block(const Layout& layout, int64_t first, int64_t row[BLOCK]) {
  const int64_t width = layout.rows - first < BLOCK ? layout.rows - first : BLOCK;
  for (int64_t j = 0; j < width; j++)
    row[j] = row_in(first, width, j, layout.rows, layout.paired) * layout.steps;
  return width;
}

void pack_block(const uint32_t* from, uint32_t* block, const Layout& layout, int64_t first) {
  int64_t row[BLOCK];
  const int64_t width = rows_of_block(layout, first, row);
  // A line of each row at a time, so that they stay in the cache while they are spread.
  for (int64_t start = 0; start < layout.steps; start += 64) {
    const int64_t stop = start + 64 < layout.steps ? start + 64 : layout.steps;
    int64_t j = 0;
    for (; j + 4 <= width; j += 4) {
      auto load = [&](int64_t i, int64_t k) {
        return _mm_loadu_ps(reinterpret_cast<const float*>(from + row[j + i] + k));
      };
      int64_t k = start;
      for (; k + 4 <= stop; k += 4) {
        __m128 a = load(0, k), b = load(1, k), c = load(2, k), d = load(3, k);
        _MM_TRANSPOSE4_PS(a, b, c, d);
        float* at = reinterpret_cast<float*>(block + k * width + j);
        _mm_storeu_ps(at, a);
        _mm_storeu_ps(at + width, b);
        _mm_storeu_ps(at + 2 * width, c);
        _mm_storeu_ps(at + 3 * width, d);
      }
      for (; k < stop; k++)
        for (int i = 0; i < 4; i++) block[k * width + j + i] = from[row[j + i] + k];
    }
    for (; j < width; j++)
      for (int64_t k = start; k < stop; k++) block[k * width + j] = from[row[j] + k];
  }
}

void unpack_block(const uint32_t* block, uint32_t* to, const Layout& layout, int64_t first) {
  int64_t row[BLOCK];
  const int64_t width = rows_of_block(layout, first, row);
  for (int64_t j = 0; j < width; j++)
    for (int64_t k = 0; k < layout.steps; k++) to[row[j] + k] = block[k * width + j];
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

// Matrices [rows, steps] of 4 bytes, one after the other, into the order that kernels read, or back.
void moe_serve_pack(const void* from, void* to, int64_t matrices, int64_t rows, int64_t steps,
                    int32_t paired, int32_t unpack, int32_t threads) {
  const Layout layout{rows, steps, paired != 0};
  const int64_t blocks = (rows + BLOCK - 1) / BLOCK;
  for_each(matrices * blocks, threads, [=](int64_t item) {
    const int64_t matrix = item / blocks * rows * steps, first = item % blocks * BLOCK;
    const uint32_t* source = static_cast<const uint32_t*>(from) + matrix;
    uint32_t* target = static_cast<uint32_t*>(to) + matrix;
    if (unpack)
      unpack_block(source + first * steps, target, layout, first);
    else
      pack_block(source, target + first * steps, layout, first);
  });
}

int moe_serve_quantize(const QuantizeCall* call) { return active->quantize(call); }
int moe_serve_moe(const MoeCall* call) { return active->moe(call); }
int moe_serve_grouped(const GroupedCall* call) { return active->grouped(call); }
int moe_serve_norm(const NormCall* call) { return active->norm(call); }
int moe_serve_attention_inputs(const AttentionInputsCall* call) {
  return active->attention_inputs(call);
}
int moe_serve_router(const RouterCall* call) { return active->router(call); }
int moe_serve_attention(const AttentionCall* call) { return active->attention(call); }
float moe_serve_read(const LimitCall* call) { return active->read(call); }
double moe_serve_peak(const LimitCall* call) { return active->peak(call); }
}
#pragma GCC visibility pop
