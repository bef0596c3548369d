// e^x of eight numbers, within two units in the last place.
#pragma once

#include "vectors.h"

#ifdef WATERFLOW_FUSED

namespace waterflow {

// Powers of two by the exponent's bits, the rest by a polynomial (Cephes). Zero where it would have fewer digits, e^88
// at most; what is no number stays none: of two the processor's minimum and maximum return the second, if either is
// none.
WATERFLOW_FUSED_INLINE __m256 exp_of(__m256 x) {
  const __m256 least = _mm256_set1_ps(-87.0f);
  const __m256 shown = _mm256_cmp_ps(x, least, _CMP_NLT_UQ);
  x = _mm256_min_ps(_mm256_set1_ps(88.0f), _mm256_max_ps(least, x));
  const __m256 twos = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504088896341f)),
                                      _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  x = _mm256_fnmadd_ps(twos, _mm256_set1_ps(0.693359375f), x);
  x = _mm256_fnmadd_ps(twos, _mm256_set1_ps(-2.12194440e-4f), x);
  __m256 sum = _mm256_set1_ps(1.9875691500e-4f);
  sum = _mm256_fmadd_ps(sum, x, _mm256_set1_ps(1.3981999507e-3f));
  sum = _mm256_fmadd_ps(sum, x, _mm256_set1_ps(8.3334519073e-3f));
  sum = _mm256_fmadd_ps(sum, x, _mm256_set1_ps(4.1665795894e-2f));
  sum = _mm256_fmadd_ps(sum, x, _mm256_set1_ps(1.6666665459e-1f));
  sum = _mm256_fmadd_ps(sum, x, _mm256_set1_ps(5.0000001201e-1f));
  sum = _mm256_add_ps(_mm256_fmadd_ps(sum, _mm256_mul_ps(x, x), x), _mm256_set1_ps(1.0f));
  const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(twos), _mm256_set1_epi32(127)), 23);
  return _mm256_and_ps(_mm256_mul_ps(sum, _mm256_castsi256_ps(exponent)), shown);
}

}  // namespace waterflow

#endif
