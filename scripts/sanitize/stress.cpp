// Calls the CPU kernels from several threads at once, on teams of changing sizes, and compares with
// one thread: for the sanitizers, which watch meanwhile. Ends with 1 where a result differs.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <random>
#include <thread>
#include <vector>

#include "api.h"

extern "C" {
const char* moe_serve_choose(const char*);
void moe_serve_pack(const void*, void*, int64_t, int64_t, int64_t, int32_t, int32_t, int32_t);
int moe_serve_quantize(const QuantizeCall*);
int moe_serve_moe(const MoeCall*);
int moe_serve_norm(const NormCall*);
int moe_serve_attention(const AttentionCall*);
}

namespace {

constexpr int64_t EXPERTS = 6, TOP_K = 2, TOKENS = 133;
constexpr int32_t GROUP = 32;

std::vector<float> normal(int64_t count, unsigned seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> draw;
  std::vector<float> values(count);
  for (float& value : values) value = draw(rng);
  return values;
}

// `bits` 0: packed as they are. Sizes are awkward: quantised columns stand by eights.
struct Layer {
  const int32_t bits;
  const int64_t hidden = bits ? 72 : 70, inner = bits ? 40 : 36;
  // More than any packing takes; zeros, as `moe_serve_quantize` wants them.
  std::vector<float> gate_up = std::vector<float>(EXPERTS * 96 * hidden);
  std::vector<float> down = std::vector<float>(EXPERTS * 96 * inner);
  std::vector<float> x = normal(TOKENS * hidden, 1), weights = normal(TOKENS * TOP_K, 2);
  std::vector<int64_t> ids;

  explicit Layer(int32_t bits) : bits(bits) {
    auto plain = normal(EXPERTS * 2 * inner * hidden, 3);
    auto plain_down = normal(EXPERTS * hidden * inner, 4);
    pack(plain, gate_up, 2 * inner, hidden, 1);
    pack(plain_down, down, hidden, inner, 0);
    std::mt19937 rng(5);
    for (int64_t t = 0; t < TOKENS; t++) {
      int64_t first = rng() % EXPERTS;
      ids.push_back(first);
      ids.push_back((first + 1 + rng() % (EXPERTS - 1)) % EXPERTS);
    }
  }

  void pack(const std::vector<float>& from, std::vector<float>& to, int64_t rows, int64_t columns,
            int32_t is_paired) const {
    if (!bits)
      return moe_serve_pack(from.data(), to.data(), EXPERTS, rows, columns, is_paired, 0, 3);
    QuantizeCall call{from.data(), to.data(), EXPERTS, rows, columns, MOE_SERVE_FLOAT32,
                      bits,        GROUP,     is_paired, 3};
    moe_serve_quantize(&call);
  }

  std::vector<float> run(int threads) const {
    std::vector<float> out(TOKENS * hidden), normed(TOKENS * hidden);
    MoeCall call{};
    call.x = x.data();
    call.ids = ids.data();
    call.weights = weights.data();
    call.gate_up.data = gate_up.data();
    call.gate_up.experts = EXPERTS;
    call.gate_up.rows = 2 * inner;
    call.gate_up.columns = hidden;
    call.gate_up.bits = call.down.bits = bits;
    call.gate_up.group = call.down.group = GROUP;
    call.down.data = down.data();
    call.down.experts = EXPERTS;
    call.down.rows = hidden;
    call.down.columns = inner;
    call.out = out.data();
    call.tokens = TOKENS;
    call.top_k = TOP_K;
    call.dtype = MOE_SERVE_FLOAT32;
    call.activation = MOE_SERVE_SILU;
    call.threads = threads;
    moe_serve_moe(&call);
    NormCall norm{};
    norm.x = out.data();
    norm.weight = x.data();
    norm.total = out.data();
    norm.out = normed.data();
    norm.rows = TOKENS;
    norm.width = norm.x_stride = hidden;
    norm.eps = 1e-6f;
    norm.dtype = MOE_SERVE_FLOAT32;
    norm.threads = threads;
    moe_serve_norm(&norm);
    return normed;
  }
};

// Two sequences with one new token and two with more; contexts end within tiles and beyond a split.
struct Attention {
  static constexpr int64_t HEADS = 4, KV_HEADS = 2, SIZE = 32, SLOTS = 16, BLOCKS = 80;
  const std::vector<int64_t> starts{0, 1, 2, 39, 42}, lens{5, 1100, 40, 131};
  std::vector<int64_t> tables;
  std::vector<float> q = normal(42 * HEADS * SIZE, 6);
  std::vector<float> keys = normal(BLOCKS * SLOTS * KV_HEADS * SIZE, 7);
  std::vector<float> values = normal(BLOCKS * SLOTS * KV_HEADS * SIZE, 8);

  Attention() {
    for (int64_t i = 0; i < 4 * BLOCKS; i++) tables.push_back(i * 7 % BLOCKS);
  }

  std::vector<float> run(int threads) const {
    std::vector<float> out(q.size());
    AttentionCall call{};
    call.q = q.data();
    call.keys = keys.data();
    call.values = values.data();
    call.tables = tables.data();
    call.query_starts = starts.data();
    call.context_lens = lens.data();
    call.out = out.data();
    call.sequences = 4;
    call.table_stride = BLOCKS;
    call.block_size = SLOTS;
    call.q_stride = HEADS * SIZE;
    call.heads = HEADS;
    call.kv_heads = KV_HEADS;
    call.head_dim = SIZE;
    call.window = int64_t{1} << 40;
    call.scale = 0.2f;
    call.value_scale = 1.0f;
    call.dtype = MOE_SERVE_FLOAT32;
    call.threads = threads;
    moe_serve_attention(&call);
    return out;
  }
};

template <class Work>
int count_different(const Work& layer, int rounds) {
  const std::vector<float> expected = layer.run(1);
  int wrong = 0;
  auto call = [&](int caller) {
    for (int i = 0; i < rounds; i++) {
      if (layer.run(1 + (i + caller) % 5) != expected) __atomic_fetch_add(&wrong, 1, 0);
      // Long enough that the team goes to sleep now and then.
      if (i % 16 == 0) usleep(500);
    }
  };
  std::thread other(call, 1);
  call(0);
  other.join();
  return wrong;
}

}  // namespace

int main(int count, char** arguments) {
  const int rounds = count > 1 ? atoi(arguments[1]) : 200;
  for (const char* name : {"avx2", "avx512", "avx512_bf16", "amx"}) {
    if (!moe_serve_choose(name)) continue;
    for (int32_t bits : {0, 8, 4}) {
      const int wrong = count_different(Layer(bits), rounds);
      printf("%s, %d bits: %d of %d calls differ\n", name, bits ? bits : 32, wrong, 2 * rounds);
      if (wrong) return 1;
    }
    const int wrong = count_different(Attention(), rounds);
    printf("%s, attention: %d of %d calls differ\n", name, wrong, 2 * rounds);
    if (wrong) return 1;
  }
  return 0;
}
