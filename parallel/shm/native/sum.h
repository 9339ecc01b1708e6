// Sums over ranks: in fp32, in order of rank, rounded once; integers wrap around.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

// As Python numbers them.
enum Number : uint32_t { FLOAT32, BFLOAT16, FLOAT16, INT32, UINT8 };

inline size_t bytes_of(uint32_t number) {
  return number == UINT8 ? 1 : number == BFLOAT16 || number == FLOAT16 ? 2 : 4;
}

namespace sums {

#define ALWAYS_INLINE inline __attribute__((always_inline))
#if defined(__x86_64__)
// Every CPU with AVX2 has F16C.
#define AVX2 __attribute__((target("avx2,f16c")))
#endif

template <class To, class From>
ALWAYS_INLINE To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "bits");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// A number as it is stored, and the wider one it is added in. All round to nearest, ties to even,
// and keep NaN a NaN, with the part of its payload that fits.
template <class T>
struct Plain {
  using Stored = T;
  using Wide = T;
  static ALWAYS_INLINE T widen(T x) { return x; }
  static ALWAYS_INLINE T narrow(T x) { return x; }
};

struct BFloat16 {
  using Stored = uint16_t;
  using Wide = float;
  static ALWAYS_INLINE float widen(uint16_t x) {
    return same_bits<float>(static_cast<uint32_t>(x) << 16);
  }
  static ALWAYS_INLINE uint16_t narrow(float x) {
    const uint32_t bits = same_bits<uint32_t>(x);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return x != x ? (bits >> 16) | 0x40 : rounded;
  }
};

struct Float16 {
  using Stored = uint16_t;
  using Wide = float;
#if defined(__aarch64__)
  static ALWAYS_INLINE float widen(uint16_t x) { return same_bits<__fp16>(x); }
  static ALWAYS_INLINE uint16_t narrow(float x) {
    return same_bits<uint16_t>(static_cast<__fp16>(x));
  }
#else
  static ALWAYS_INLINE float widen(uint16_t x) {
    const uint32_t sign = (x & 0x8000u) << 16, rest = x & 0x7fff;
    uint32_t bits = (rest << 13) + (112u << 23);  // the exponent's bias is 15, then 127
    if (rest >= 0x7c00) bits = rest << 13 | 0x7f800000 | (rest > 0x7c00) << 22;
    if (rest < 0x0400) bits = same_bits<uint32_t>(rest * 0x1p-24f);
    return same_bits<float>(sign | bits);
  }
  static ALWAYS_INLINE uint16_t narrow(float x) {
    const uint32_t bits = same_bits<uint32_t>(x), rest = bits & 0x7fffffff;
    uint32_t half = (rest - (112u << 23) + 0xfff + (rest >> 13 & 1)) >> 13;
    // Below the least normal one: units of 2^-24, which adding to 0.5 rounds to.
    if (rest < 0x38800000) {
      half = same_bits<uint32_t>(same_bits<float>(rest) + 0.5f) - same_bits<uint32_t>(0.5f);
    }
    // From half a unit past the largest.
    if (rest >= 0x477ff000) half = 0x7c00;
    if (rest > 0x7f800000) half = 0x7e00 | (rest >> 13 & 0x3ff);
    return (bits >> 16 & 0x8000) | half;
  }
#endif
};

// A piece that stays in the nearest cache. What is summed up is written when all of it was read:
// `out` may be one of the parts.
constexpr size_t PIECE = 1024;

template <class N>
ALWAYS_INLINE void add_up(void* out, const void* const* parts, int num_parts, size_t count) {
  using Stored = typename N::Stored;
  typename N::Wide total[PIECE];
  for (size_t start = 0; start < count; start += PIECE) {
    const size_t n = count - start < PIECE ? count - start : PIECE;
    const Stored* first = static_cast<const Stored*>(parts[0]) + start;
    for (size_t i = 0; i < n; i++) total[i] = N::widen(first[i]);
    for (int part = 1; part < num_parts; part++) {
      const Stored* next = static_cast<const Stored*>(parts[part]) + start;
      for (size_t i = 0; i < n; i++) total[i] += N::widen(next[i]);
    }
    Stored* target = static_cast<Stored*>(out) + start;
    for (size_t i = 0; i < n; i++) target[i] = N::narrow(total[i]);
  }
}

// For any processor of the kind, in plain code.
inline void add_plain(
    uint32_t number, void* out, const void* const* parts, int num_parts, size_t count) {
  if (number == FLOAT32) return add_up<Plain<float>>(out, parts, num_parts, count);
  if (number == BFLOAT16) return add_up<BFloat16>(out, parts, num_parts, count);
  if (number == FLOAT16) return add_up<Float16>(out, parts, num_parts, count);
  if (number == INT32) return add_up<Plain<uint32_t>>(out, parts, num_parts, count);
  add_up<Plain<uint8_t>>(out, parts, num_parts, count);
}

#if defined(__x86_64__)
AVX2 inline void add_halves(
    uint16_t* out, const void* const* parts, int num_parts, size_t count) {
  size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    __m256 total = _mm256_setzero_ps();
    for (int part = 0; part < num_parts; part++) {
      const uint16_t* x = static_cast<const uint16_t*>(parts[part]) + i;
      const __m256 wide = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
      // Not 0 + x: that would lose the sign of a negative zero.
      total = part ? _mm256_add_ps(total, wide) : wide;
    }
    const __m128i half = _mm256_cvtps_ph(total, _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), half);
  }
  const void* rest[64];
  for (int part = 0; part < num_parts; part++) {
    rest[part] = static_cast<const uint16_t*>(parts[part]) + i;
  }
  add_up<Float16>(out + i, rest, num_parts, count - i);
}

// The same code, which the compiler turns into wider instructions.
AVX2 inline void add_avx2(
    uint32_t number, void* out, const void* const* parts, int num_parts, size_t count) {
  if (number == FLOAT32) return add_up<Plain<float>>(out, parts, num_parts, count);
  if (number == BFLOAT16) return add_up<BFloat16>(out, parts, num_parts, count);
  if (number == FLOAT16) {
    return add_halves(static_cast<uint16_t*>(out), parts, num_parts, count);
  }
  if (number == INT32) return add_up<Plain<uint32_t>>(out, parts, num_parts, count);
  add_up<Plain<uint8_t>>(out, parts, num_parts, count);
}
#endif

}  // namespace sums

// `count` numbers of each part, at most 64 parts; `out` may be one of them.
inline void add_in_order(
    uint32_t number, void* out, const void* const* parts, int num_parts, size_t count) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return sums::add_avx2(number, out, parts, num_parts, count);
#endif
  sums::add_plain(number, out, parts, num_parts, count);
}
