#include "short_products.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "rows.h"

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

constexpr int kMostInner = 256;
constexpr int64_t kMostWork = 1 << 18;

#ifdef WATERFLOW_FUSED

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
    multiply_all_rows(rows, left, row_apart, inner_apart, block, apart, bias == nullptr ? nullptr : bias + column, 0,
                      result + column, columns, inner);
  }
}

#else

constexpr int kColumns = 16;
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
