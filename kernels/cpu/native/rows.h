// What works on one row at a time: norms, what attention reads, the router.
#pragma once

#include "api.h"
#include "parallel.h"
#include "simd.h"

namespace {

// 1 / sqrt(mean of squares + eps). Four sums that take turns: the order depends on the width alone.
template <class T>
inline float root_scale(const T* x, int64_t width, float eps) {
  Vec sums[4] = {set1(0.0f), set1(0.0f), set1(0.0f), set1(0.0f)};
  int turn = 0;
  for (int64_t i = 0; i < width; i += LANES, turn = (turn + 1) % 4) {
    Vec v = load(x + i, width - i < LANES ? static_cast<int>(width - i) : LANES);
    sums[turn] = fma(v, v, sums[turn]);
  }
  const float total = sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
  return 1.0f / __builtin_sqrtf(total / static_cast<float>(width) + eps);
}

// Rounded before the weight and after it.
template <class T>
inline Vec normed(const T* x, const T* weight, float scale, int n) {
  Vec v = rounded_to(mul(load(x, n), set1(scale)), x);
  return rounded_to(mul(load(weight, n), v), x);
}

// Rows that a thread takes at once: some microseconds' worth, so that few rows wake nobody.
inline int64_t rows_at_once(int64_t width) { return width >= 32768 ? 1 : 32768 / width; }

template <class T>
int run_norm(const NormCall& call) {
  const int64_t part = rows_at_once(call.width);
  const T* weight = static_cast<const T*>(call.weight);
  for_each_run(call.rows, part, call.threads, [&](int64_t first, int64_t stop) {
    for (int64_t r = first; r < stop; r++) {
      const T* x = static_cast<const T*>(call.x) + r * call.x_stride;
      T* out = static_cast<T*>(call.out) + r * call.width;
      if (call.y) {
        const T* y = static_cast<const T*>(call.y) + r * call.y_stride;
        T* total = static_cast<T*>(call.total) + r * call.width;
        for (int64_t i = 0; i < call.width; i += LANES) {
          int n = call.width - i < LANES ? static_cast<int>(call.width - i) : LANES;
          store(total + i, add(load(x + i, n), load(y + i, n)), n);
        }
        x = total;
      }
      const float scale = root_scale(x, call.width, call.eps);
      for (int64_t i = 0; i < call.width; i += LANES) {
        int n = call.width - i < LANES ? static_cast<int>(call.width - i) : LANES;
        store(out + i, normed(x + i, weight + i, scale, n), n);
      }
    }
  });
  return MOE_SERVE_DONE;
}

// One head: normed where there is a weight, its first `rotary` dimensions turned. Each product is
// rounded before they are added, as one operation after the other would.
template <class T>
inline void turn_head(const T* x, const T* weight, float eps, const T* cos, const T* sin,
                      int64_t head_dim, int64_t rotary, T* out) {
  const float scale = weight ? root_scale(x, head_dim, eps) : 0.0f;
  auto value = [&](int64_t i, int n) {
    return weight ? normed(x + i, weight + i, scale, n) : load(x + i, n);
  };
  const int64_t pairs = rotary / 2;
  for (int64_t i = 0; i < pairs; i += LANES) {
    const int n = pairs - i < LANES ? static_cast<int>(pairs - i) : LANES;
    Vec first = value(i, n), second = value(pairs + i, n);
    Vec negative = sub(set1(0.0f), second);
    Vec a = rounded_to(mul(first, load(cos + i, n)), x);
    Vec b = rounded_to(mul(negative, load(sin + i, n)), x);
    Vec c = rounded_to(mul(second, load(cos + pairs + i, n)), x);
    Vec d = rounded_to(mul(first, load(sin + pairs + i, n)), x);
    store(out + i, add(a, b), n);
    store(out + pairs + i, add(c, d), n);
  }
  for (int64_t i = rotary; i < head_dim; i += LANES) {
    const int n = head_dim - i < LANES ? static_cast<int>(head_dim - i) : LANES;
    store(out + i, value(i, n), n);
  }
}

template <class T>
int run_attention_inputs(const AttentionInputsCall& call) {
  const T *q_weight = static_cast<const T*>(call.q_weight),
          *k_weight = static_cast<const T*>(call.k_weight);
  const int64_t size = call.head_dim;
  const int64_t part = rows_at_once((call.heads + 2 * call.kv_heads) * size);
  for_each_run(call.tokens, part, call.threads, [&](int64_t first, int64_t stop) {
    for (int64_t t = first; t < stop; t++) {
      const T* cos = static_cast<const T*>(call.cos) + t * call.rotary_dim;
      const T* sin = static_cast<const T*>(call.sin) + t * call.rotary_dim;
      const T* q = static_cast<const T*>(call.q) + t * call.q_stride;
      for (int64_t h = 0; h < call.heads; h++)
        turn_head(q + h * size, q_weight, call.eps, cos, sin, size, call.rotary_dim,
                  static_cast<T*>(call.out) + (t * call.heads + h) * size);
      const int64_t slot = call.slots[t];
      if (slot < 0) continue;  // of padding nothing is stored
      const T* k = static_cast<const T*>(call.k) + t * call.k_stride;
      T* keys = static_cast<T*>(call.keys) + slot * call.kv_heads * size;
      for (int64_t h = 0; h < call.kv_heads; h++)
        turn_head(k + h * size, k_weight, call.eps, cos, sin, size, call.rotary_dim,
                  keys + h * size);
      memcpy(static_cast<T*>(call.values) + slot * call.kv_heads * size,
             static_cast<const T*>(call.v) + t * call.v_stride, call.kv_heads * size * sizeof(T));
    }
  });
  return MOE_SERVE_DONE;
}

// The largest of `count` values not taken yet, the lowest index of equal ones; a NaN is less than
// any number, and is found when nothing else is left.
inline int64_t best_of(const float* values, const bool* taken, int64_t count) {
  int64_t best = -1;
  for (int64_t i = 0; i < count; i++)
    if (!taken[i] && (best < 0 || values[i] > values[best] ||
                      (values[best] != values[best] && values[i] == values[i])))
      best = i;
  return best;
}

constexpr int64_t MOST_EXPERTS = 1024;  // kernels/cpu/router.py keeps to it

inline void mask_groups(const RouterCall& call, const float* choice, bool* taken) {
  const int64_t size = call.experts / call.groups;
  float worth[MOST_EXPERTS];
  bool kept[MOST_EXPERTS] = {};
  for (int64_t g = 0; g < call.groups; g++) {
    const float* of = choice + g * size;
    int64_t first = best_of(of, taken + g * size, size);
    worth[g] = of[first];
    if (call.bias && size > 1) {
      taken[g * size + first] = true;
      worth[g] += of[best_of(of, taken + g * size, size)];
      taken[g * size + first] = false;
    }
  }
  for (int64_t i = 0; i < call.top_groups; i++) kept[best_of(worth, kept, call.groups)] = true;
  for (int64_t e = 0; e < call.experts; e++) taken[e] = !kept[e / size];
}

inline void route_token(const RouterCall& call, int64_t t) {
  const float* logits = call.logits + t * call.experts;
  float scores[MOST_EXPERTS], choice[MOST_EXPERTS];
  bool taken[MOST_EXPERTS] = {};
  const int64_t count = call.experts;
  Vec most = set1(-__builtin_inff());
  auto lanes = [&](int64_t e) { return count - e < LANES ? static_cast<int>(count - e) : LANES; };
  if (!call.is_sigmoid) {
    float largest = logits[0];
    for (int64_t e = 1; e < count; e++)
      if (!(logits[e] <= largest)) largest = logits[e];
    most = set1(largest);
  }
  for (int64_t e = 0; e < count; e += LANES) {
    Vec x = load(logits + e, lanes(e));
    Vec y = call.is_sigmoid ? div(set1(1.0f), add(set1(1.0f), exp(sub(set1(0.0f), x))))
                            : exp(sub(x, most));
    store(scores + e, y, lanes(e));
  }
  if (!call.is_sigmoid) {
    Vec sums = set1(0.0f);
    for (int64_t e = 0; e < count; e += LANES) sums = add(sums, load(scores + e, lanes(e)));
    const float total = sum(sums);
    for (int64_t e = 0; e < count; e++) scores[e] /= total;
  }
  for (int64_t e = 0; e < count; e++) choice[e] = call.bias ? scores[e] + call.bias[e] : scores[e];
  if (call.top_groups < call.groups) mask_groups(call, choice, taken);
  float total = 0.0f;
  int64_t* ids = call.ids + t * call.top_k;
  float* weights = call.weights + t * call.top_k;
  for (int64_t k = 0; k < call.top_k; k++) {
    ids[k] = best_of(choice, taken, count);
    taken[ids[k]] = true;
    weights[k] = scores[ids[k]];
    total += weights[k];
  }
  for (int64_t k = 0; k < call.top_k; k++) {
    if (call.renormalize) weights[k] /= total;
    if (call.scale != 1.0f) weights[k] *= call.scale;
  }
}

inline int run_router(const RouterCall& call) {
  const int64_t valid = call.num_valid && *call.num_valid < call.tokens ? *call.num_valid
                                                                        : call.tokens;
  for_each_run(valid, 16, call.threads, [&](int64_t first, int64_t stop) {
    for (int64_t t = first; t < stop; t++) route_token(call, t);
  });
  for (int64_t i = valid * call.top_k; i < call.tokens * call.top_k; i++) {
    call.ids[i] = -1;
    call.weights[i] = 0.0f;
  }
  if (call.load)
    for (int64_t t = 0; t < valid; t++)
      for (int64_t k = 0; k < call.top_k; k++)
        call.load[(call.phases ? call.phases[t] * call.experts : 0) + call.ids[t * call.top_k + k]]++;
  return MOE_SERVE_DONE;
}

}  // namespace
