#include "waterflow/executor/csrc/kernels/small_gemm.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

// Functions that are written in vectors of eight, where a product and a sum are rounded once.
#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define WATERFLOW_FUSED __attribute__((target("avx2,fma")))
#endif

namespace waterflow {

void Product::by(Gemm* gemm) const {
  const float one = 1.0f, beta = bias == nullptr ? 0.0f : 1.0f;
  if (bias != nullptr) {
    for (int64_t i = 0; i < rows; ++i) std::memcpy(result + i * columns, bias, sizeof(float) * columns);
  }
  // A matrix by rows is its transpose by columns.
  gemm(&right_side.turn, &left_side.turn, &columns, &rows, &inner, &one, right, &right_side.apart, left,
       &left_side.apart, &beta, result, &columns);
}

namespace {

constexpr int kColumns = 16;  // two vectors, in registers beside some rows
constexpr int kMostInner = 256;
constexpr int64_t kMostWork = 1 << 18;

#ifdef WATERFLOW_FUSED

bool can_fuse() {
  static const bool can = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return can;
}

// to = left right + bias, for kRows rows; `right` has kColumns columns. Elements of `left` stand `row_apart` and
// `inner_apart`, rows of the others so far apart; `bias` may be null. Each sum is one chain in the order of the inner
// dimension, from zero, each product rounded once with its sum.
template <int kRows>
WATERFLOW_FUSED inline void multiply_rows(const float* left, int64_t row_apart, int64_t inner_apart, const float* right,
                                          int64_t right_apart, const float* bias, float* to, int64_t to_apart,
                                          int64_t inner) {
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
    if (bias != nullptr) {
      low[row] = _mm256_add_ps(_mm256_loadu_ps(bias), low[row]);
      high[row] = _mm256_add_ps(_mm256_loadu_ps(bias + 8), high[row]);
    }
    _mm256_storeu_ps(to + row * to_apart, low[row]);
    _mm256_storeu_ps(to + row * to_apart + 8, high[row]);
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

// The order of MKL's sums for inner dimensions that it does not cut.
WATERFLOW_FUSED void multiply(const Product& product) {
  const auto& [left, left_side, right, right_side, bias, result, rows, columns, inner] = product;
  const int64_t row_apart = left_side.turn == 'n' ? left_side.apart : 1;
  const int64_t inner_apart = left_side.turn == 'n' ? 1 : left_side.apart;
  const bool turned = right_side.turn == 't';
  alignas(32) float turned_columns[kMostInner * kColumns];
  for (int64_t column = 0; column < columns; column += kColumns) {
    const float* block = right + (turned ? column * right_side.apart : column);
    int64_t apart = right_side.apart;
    if (turned) {
      turn_columns(block, apart, inner, turned_columns);
      block = turned_columns;
      apart = kColumns;
    }
    const float* added = bias == nullptr ? nullptr : bias + column;
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4) {
      multiply_rows<4>(left + row * row_apart, row_apart, inner_apart, block, apart, added,
                       result + row * columns + column, columns, inner);
    }
    for (; row < rows; ++row) {
      multiply_rows<1>(left + row * row_apart, row_apart, inner_apart, block, apart, added,
                       result + row * columns + column, columns, inner);
    }
  }
}

#else

void multiply(const Product&) {}
bool can_fuse() { return false; }

#endif

// Numbers of both signs and of magnitudes that are far apart: another order of sums would show.
void fill(float* values, size_t count, uint64_t seed) {
  uint64_t state = seed;
  for (size_t i = 0; i < count; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const auto part = static_cast<float>(static_cast<int32_t>(state >> 32)) * 0x1p-31f;
    values[i] = part * static_cast<float>(1 << ((state >> 20) & 7));
  }
}

template <typename Call>
int64_t least_time(const Call& call) {
  using clock = std::chrono::steady_clock;
  auto least = std::numeric_limits<int64_t>::max();
  for (int round = 0; round < 5; ++round) {
    const auto start = clock::now();
    for (int i = 0; i < 10; ++i) call();
    least = std::min<int64_t>(least, (clock::now() - start).count());
  }
  return least;
}

// On numbers of our own, from memory that is aligned and that is not, with an element that is a sum of negative zeros.
bool is_better(const Product& like, Gemm* gemm) {
  const auto rows = static_cast<size_t>(like.rows), columns = static_cast<size_t>(like.columns);
  const auto inner = static_cast<size_t>(like.inner);
  std::vector<float> left(rows * inner + 1), right(inner * columns + 1), bias(columns + 1);
  std::vector<float> ours(rows * columns + 1), theirs(ours.size());
  Product product = like;
  for (const size_t shift : {0, 1, 0}) {
    fill(left.data(), left.size(), shift + 1);
    fill(right.data(), right.size(), shift + 11);
    fill(bias.data(), bias.size(), shift + 21);
    for (size_t k = 0; k < inner; ++k) {
      left[shift + (like.left_side.turn == 'n' ? k : k * rows)] = 0.0f;
      right[shift + (like.right_side.turn == 'n' ? k * columns : k)] = -1.0f;
    }
    bias[shift] = -0.0f;
    product.left = left.data() + shift;
    product.right = right.data() + shift;
    product.bias = like.bias == nullptr ? nullptr : bias.data() + shift;
    product.result = theirs.data() + shift;
    product.by(gemm);
    product.result = ours.data() + shift;
    multiply(product);
    if (std::memcmp(ours.data() + shift, theirs.data() + shift, sizeof(float) * rows * columns) != 0) return false;
  }
  return least_time([&] { multiply(product); }) < least_time([&] { product.by(gemm); });
}

bool lies_close(const Product& product) {
  return product.left_side.apart == (product.left_side.turn == 'n' ? product.inner : product.rows) &&
         product.right_side.apart == (product.right_side.turn == 'n' ? product.columns : product.inner);
}

// What was found out, by shape: entries are never taken out.
struct Found {
  static constexpr size_t kSize = 4096, kTries = 8;
  std::array<std::atomic<uint64_t>, kSize> entries{};
};

Found& found() {
  static Found made;
  return made;
}

}  // namespace

int64_t short_products() {
  const auto& entries = found().entries;
  return std::count_if(entries.begin(), entries.end(), [](const auto& entry) { return (entry & 1) != 0; });
}

bool multiply_shortly(const Product& product, Gemm* gemm) {
  const int64_t work = int64_t{product.rows} * product.columns * product.inner;
  if (product.columns % kColumns != 0 || product.inner > kMostInner || work > kMostWork || !lies_close(product) ||
      !can_fuse()) {
    return false;
  }
  const uint64_t shape = (static_cast<uint64_t>(product.rows) << 40) | (static_cast<uint64_t>(product.columns) << 16) |
                         (static_cast<uint64_t>(product.inner) << 4);
  // Never 0, which is an entry's first value.
  const uint64_t key = shape | (product.left_side.turn == 't') << 3 | (product.right_side.turn == 't') << 2 |
                       (product.bias != nullptr) << 1;
  const size_t place = (key * 0x9e3779b97f4a7c15u) >> 52;
  for (size_t i = 0; i < Found::kTries; ++i) {
    auto& entry = found().entries[(place + i) % Found::kSize];
    uint64_t seen = entry.load(std::memory_order_relaxed);
    if (seen == 0) {
      const uint64_t made = key | static_cast<uint64_t>(is_better(product, gemm));
      if (entry.compare_exchange_strong(seen, made, std::memory_order_relaxed)) seen = made;
    }
    if ((seen & ~uint64_t{1}) != key) continue;
    if ((seen & 1) == 0) return false;
    multiply(product);
    return true;
  }
  return false;
}

}  // namespace waterflow
