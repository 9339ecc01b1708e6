// Vectors of integers, for weights and rows of few bits; see simd.h.
#pragma once

#include "simd.h"

namespace {

#if defined(__AVX512F__)

inline Ints and_ints(Ints a, Ints b) { return _mm512_and_si512(a, b); }
inline Ints add_ints(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints max_ints(Ints a, Ints b) { return _mm512_max_epi32(a, b); }
inline Ints high_halves(Ints x) { return _mm512_srli_epi16(x, 4); }
inline Ints bits_of(Vec x) { return _mm512_castps_si512(x); }
inline Ints nearest(Vec x) { return _mm512_cvtps_epi32(x); }
inline Vec to_float(Ints x) { return _mm512_cvtepi32_ps(x); }
inline Vec load_halves(const void* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}
inline Vec load_bytes(const void* p) {
  return to_float(_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))));
}
// As signed bytes; what does not fit becomes the nearest that does.
inline void store_bytes(void* p, Ints x) {
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(x));
}
inline Ints even_bytes(Ints x) { return _mm512_and_si512(x, set1_int(0x00FF00FFu)); }
inline Ints odd_bytes(Ints x) { return _mm512_srli_epi16(x, 8); }
inline Ints even_signed(Ints x) { return _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8); }
inline Ints odd_signed(Ints x) { return _mm512_srai_epi16(x, 8); }
inline Ints add_pairs(Ints a, Ints b) { return _mm512_madd_epi16(a, b); }
inline Ints add_byte_pairs(Ints w, Ints x) { return _mm512_maddubs_epi16(w, x); }

#else

inline Ints and_ints(Ints a, Ints b) { return _mm256_and_si256(a, b); }
inline Ints add_ints(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
inline Ints max_ints(Ints a, Ints b) { return _mm256_max_epi32(a, b); }
inline Ints high_halves(Ints x) { return _mm256_srli_epi16(x, 4); }
inline Ints bits_of(Vec x) { return _mm256_castps_si256(x); }
inline Ints nearest(Vec x) { return _mm256_cvtps_epi32(x); }
inline Vec to_float(Ints x) { return _mm256_cvtepi32_ps(x); }
inline Vec load_halves(const void* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
inline Vec load_bytes(const void* p) {
  return to_float(_mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p))));
}
inline void store_bytes(void* p, Ints x) {
  __m128i shorts = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  _mm_storel_epi64(static_cast<__m128i*>(p), _mm_packs_epi16(shorts, shorts));
}
inline Ints even_bytes(Ints x) { return _mm256_and_si256(x, set1_int(0x00FF00FFu)); }
inline Ints odd_bytes(Ints x) { return _mm256_srli_epi16(x, 8); }
inline Ints even_signed(Ints x) { return _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8); }
inline Ints odd_signed(Ints x) { return _mm256_srai_epi16(x, 8); }
inline Ints add_pairs(Ints a, Ints b) { return _mm256_madd_epi16(a, b); }
inline Ints add_byte_pairs(Ints w, Ints x) { return _mm256_maddubs_epi16(w, x); }

#endif

}  // namespace
