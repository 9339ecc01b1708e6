// Vectors of fp32 for the instruction set that the including file is compiled for.
//
// All of it lies in an unnamed namespace, and no C++ library header with code is included: the
// linker must never pick one file's copy of a function, built for another instruction set.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

namespace {

struct bf16 {
  uint16_t bits;
};

#if defined(__AVX512F__)

constexpr int LANES = 16;
using Vec = __m512;
using Ints = __m512i;

inline __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

inline Vec set1(float x) { return _mm512_set1_ps(x); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
// The second operand where either is NaN.
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }

inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline Vec load(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
inline void store(float* p, Vec x, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), x); }

inline Ints load_ints(const void* p) { return _mm512_loadu_si512(p); }
inline Ints load_ints(const void* p, int n) {
  return _mm512_maskz_loadu_epi32(first_lanes(n), p);
}
inline Ints set1_int(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
// Two bf16 lie in each 32 bits: the first in the low half.
inline Vec first_of_pairs(Ints x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
inline Vec second_of_pairs(Ints x) {
  return _mm512_castsi512_ps(_mm512_and_si512(x, set1_int(0xFFFF0000u)));
}

inline Vec widen(__m256i x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
inline Vec load(const bf16* p) {
  return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Vec load(const bf16* p, int n) {
  if (n == LANES) return load(p);
  uint16_t lanes[16] = {};
  memcpy(lanes, p, 2 * n);
  return load(reinterpret_cast<const bf16*>(lanes));
}

// To the nearest, ties to even; NaN stays NaN.
inline __m256i narrow(Vec x) {
  Ints bits = _mm512_castps_si512(x);
  Ints odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), set1_int(1));
  Ints rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, set1_int(0x7FFF)));
  __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  rounded = _mm512_mask_mov_epi32(rounded, nan, set1_int(0x7FC00000u));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

inline Vec pow2(Vec n) {
  Ints e = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
  return _mm512_castsi512_ps(_mm512_slli_epi32(e, 23));
}
inline Vec round(Vec x) { return _mm512_roundscale_ps(x, 8); }
// Zero where a < b, else x.
inline Vec zero_where_less(Vec a, Vec b, Vec x) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ), x);
}
inline Vec sqrt(Vec x) { return _mm512_sqrt_ps(x); }

#else

constexpr int LANES = 8;
using Vec = __m256;
using Ints = __m256i;

inline Ints first_lanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

inline Vec set1(float x) { return _mm256_set1_ps(x); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
// The second operand where either is NaN.
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }

inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline Vec load(const float* p, int n) { return _mm256_maskload_ps(p, first_lanes(n)); }
inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
inline void store(float* p, Vec x, int n) { _mm256_maskstore_ps(p, first_lanes(n), x); }

inline Ints load_ints(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
inline Ints load_ints(const void* p, int n) {
  return _mm256_maskload_epi32(static_cast<const int*>(p), first_lanes(n));
}
inline Ints set1_int(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
inline Vec first_of_pairs(Ints x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
inline Vec second_of_pairs(Ints x) {
  return _mm256_castsi256_ps(_mm256_and_si256(x, set1_int(0xFFFF0000u)));
}

inline Vec widen(__m128i x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
inline Vec load(const bf16* p) {
  return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Vec load(const bf16* p, int n) {
  if (n == LANES) return load(p);
  uint16_t lanes[8] = {};
  memcpy(lanes, p, 2 * n);
  return load(reinterpret_cast<const bf16*>(lanes));
}

inline __m128i narrow(Vec x) {
  Ints bits = _mm256_castps_si256(x);
  Ints odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), set1_int(1));
  Ints rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, set1_int(0x7FFF)));
  Vec nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  Vec kept = _mm256_blendv_ps(_mm256_castsi256_ps(rounded),
                              _mm256_castsi256_ps(set1_int(0x7FC00000u)), nan);
  Ints high = _mm256_srli_epi32(_mm256_castps_si256(kept), 16);
  Ints packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
  return _mm256_castsi256_si128(packed);
}

inline Vec pow2(Vec n) {
  Ints e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
}
inline Vec round(Vec x) { return _mm256_round_ps(x, 8); }
inline Vec zero_where_less(Vec a, Vec b, Vec x) {
  return _mm256_and_ps(_mm256_cmp_ps(a, b, _CMP_NLT_UQ), x);
}
inline Vec sqrt(Vec x) { return _mm256_sqrt_ps(x); }

#endif

inline void store(bf16* p, Vec x) {
  auto halves = narrow(x);
  memcpy(p, &halves, sizeof halves);
}
inline void store(bf16* p, Vec x, int n) {
  auto halves = narrow(x);
  memcpy(p, &halves, 2 * n);
}

// x as the type keeps it.
inline Vec rounded_to(Vec x, const float*) { return x; }
inline Vec rounded_to(Vec x, const bf16*) { return widen(narrow(x)); }

inline float sum(Vec x) {
  float lanes[LANES];
  store(lanes, x);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
  return lanes[0];
}
#if defined(__AVX512F__)
inline float largest(Vec x) { return _mm512_reduce_max_ps(x); }
#else
inline float largest(Vec x) {
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
#endif

// e^x to about 1 unit in the last place: 2^n times a polynomial on |r| <= ln(2) / 2, the Taylor
// series to r^7 / 7!. Zero below -87.33, the largest result above 88; NaN stays NaN. An
// element's result does not depend on its lane.
inline Vec exp(Vec x) {
  Vec clamped = min(set1(88.0f), max(set1(-87.3365447504019f), x));
  Vec n = round(mul(clamped, set1(1.44269504088896341f)));
  Vec r = fma(n, set1(-0.693359375f), clamped);
  r = fma(n, set1(2.12194440e-4f), r);
  Vec p = set1(1.98412698e-4f);
  p = fma(p, r, set1(1.38888889e-3f));
  p = fma(p, r, set1(8.33333333e-3f));
  p = fma(p, r, set1(4.16666667e-2f));
  p = fma(p, r, set1(1.66666667e-1f));
  p = fma(p, r, set1(0.5f));
  p = fma(mul(p, r), r, r);
  p = add(p, set1(1.0f));
  return zero_where_less(x, set1(-87.3365447504019f), mul(p, pow2(n)));
}

inline Vec silu(Vec x) { return div(x, add(set1(1.0f), exp(sub(set1(0.0f), x)))); }
// (1 + tanh u) / 2 = 1 / (1 + e^-2u) for u = sqrt(2 / pi) * (x + 0.044715 x^3).
inline Vec gelu_tanh(Vec x) {
  Vec cubic = mul(mul(mul(x, x), x), set1(0.044715f));
  Vec u2 = mul(add(x, cubic), set1(-1.5957691216057308f));
  return div(x, add(set1(1.0f), exp(u2)));
}

}  // namespace
