// The innermost part of products of matrices: some rows by sixteen columns, in registers.
#pragma once

#include <cstdint>

#include "vectors.h"

#ifdef WATERFLOW_FUSED

namespace waterflow {

constexpr int kColumns = 16;  // two vectors

// to = left right + added, for kRows rows; `right` has kColumns columns. Elements of `left` stand `row_apart` and
// `inner_apart`, rows of the others so far apart; `added` may be null, or `to`. Each sum is one chain in the order of
// the inner dimension, from zero, each product rounded once with its sum.
template <int kRows>
WATERFLOW_FUSED inline void multiply_rows(const float* left, int64_t row_apart, int64_t inner_apart, const float* right,
                                          int64_t right_apart, const float* added, int64_t added_apart, float* to,
                                          int64_t to_apart, int64_t inner) {
  __m256 low[kRows], high[kRows];
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row) low[row] = high[row] = _mm256_setzero_ps();
  for (int64_t k = 0; k < inner; ++k) {
    const __m256 first = _mm256_loadu_ps(right), second = _mm256_loadu_ps(right + 8);
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) {
      const __m256 factor = _mm256_broadcast_ss(left + row * row_apart);
      low[row] = _mm256_fmadd_ps(factor, first, low[row]);
      high[row] = _mm256_fmadd_ps(factor, second, high[row]);
    }
    left += inner_apart;
    right += right_apart;
  }
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row) {
    if (added != nullptr) {
      low[row] = _mm256_add_ps(_mm256_loadu_ps(added + row * added_apart), low[row]);
      high[row] = _mm256_add_ps(_mm256_loadu_ps(added + row * added_apart + 8), high[row]);
    }
    _mm256_storeu_ps(to + row * to_apart, low[row]);
    _mm256_storeu_ps(to + row * to_apart + 8, high[row]);
  }
}

// The same for any number of rows.
WATERFLOW_FUSED inline void multiply_all_rows(int64_t rows, const float* left, int64_t row_apart, int64_t inner_apart,
                                              const float* right, int64_t right_apart, const float* added,
                                              int64_t added_apart, float* to, int64_t to_apart, int64_t inner) {
  const auto of = [](const float* first, int64_t distance) { return first == nullptr ? nullptr : first + distance; };
  int64_t row = 0;
  for (; row + 4 <= rows; row += 4) {
    multiply_rows<4>(left + row * row_apart, row_apart, inner_apart, right, right_apart, of(added, row * added_apart),
                     added_apart, to + row * to_apart, to_apart, inner);
  }
  for (; row < rows; ++row) {
    multiply_rows<1>(left + row * row_apart, row_apart, inner_apart, right, right_apart, of(added, row * added_apart),
                     added_apart, to + row * to_apart, to_apart, inner);
  }
}

// Eight columns of eight, from rows that stand `apart` into rows of kColumns.
WATERFLOW_FUSED inline void turn_eight(const float* from, int64_t apart, float* to) {
  __m256 row[8], pair[8], four[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) row[i] = _mm256_loadu_ps(from + i * apart);
#pragma GCC unroll 8
  for (int i = 0; i < 4; ++i) {
    pair[2 * i] = _mm256_unpacklo_ps(row[2 * i], row[2 * i + 1]);
    pair[2 * i + 1] = _mm256_unpackhi_ps(row[2 * i], row[2 * i + 1]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 2; ++i) {
    four[4 * i] = _mm256_shuffle_ps(pair[4 * i], pair[4 * i + 2], 0x44);
    four[4 * i + 1] = _mm256_shuffle_ps(pair[4 * i], pair[4 * i + 2], 0xee);
    four[4 * i + 2] = _mm256_shuffle_ps(pair[4 * i + 1], pair[4 * i + 3], 0x44);
    four[4 * i + 3] = _mm256_shuffle_ps(pair[4 * i + 1], pair[4 * i + 3], 0xee);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(to + i * kColumns, _mm256_permute2f128_ps(four[i], four[i + 4], 0x20));
    _mm256_storeu_ps(to + (i + 4) * kColumns, _mm256_permute2f128_ps(four[i], four[i + 4], 0x31));
  }
}

// Sixteen rows that stand `apart`, as columns that stand together.
WATERFLOW_FUSED inline void turn_columns(const float* from, int64_t apart, int64_t inner, float* to) {
  int64_t k = 0;
  for (; k + 8 <= inner; k += 8) {
    turn_eight(from + k, apart, to + k * kColumns);
    turn_eight(from + 8 * apart + k, apart, to + k * kColumns + 8);
  }
  for (; k < inner; ++k) {
    for (int column = 0; column < kColumns; ++column) to[k * kColumns + column] = from[column * apart + k];
  }
}

}  // namespace waterflow

#endif
