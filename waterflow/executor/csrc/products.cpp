// Small products and sums of matrices: the calls that torch makes in the end, without what it does on the way.
#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <dlfcn.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

#include "vectors.h"

namespace waterflow {
namespace {

constexpr int64_t kMostWork = 1 << 21;  // multiplications: in larger products the way does not count

// BLAS, by columns: c = alpha a b + beta c.
using Gemm = void(const char* turn_a, const char* turn_b, const int* m, const int* n, const int* k, const float* alpha,
                  const float* a, const int* lda, const float* b, const int* ldb, const float* beta, float* c,
                  const int* ldc);

// Of a matrix as columns: whether its rows stand there, and how far apart they are.
struct Side {
  char turn;
  int apart;
};

// As torch chooses it; none for matrices that it would copy, or where a size of one leaves it a choice.
std::optional<Side> side_of(const at::Tensor& matrix) {
  const int64_t rows = matrix.size(0), columns = matrix.size(1);
  if (rows < 2 || columns < 2) return std::nullopt;
  if (matrix.stride(1) == 1 && matrix.stride(0) >= columns) return Side{'n', static_cast<int>(matrix.stride(0))};
  if (matrix.stride(0) == 1 && matrix.stride(1) >= rows) return Side{'t', static_cast<int>(matrix.stride(1))};
  return std::nullopt;
}

void multiply(Gemm* gemm, const at::Tensor& left, Side a, const at::Tensor& right, Side b, float beta,
              const at::Tensor& result) {
  const int rows = static_cast<int>(result.size(0)), columns = static_cast<int>(result.size(1));
  const int inner = static_cast<int>(left.size(1));
  const float alpha = 1.0f;
  // A matrix by rows is its transpose by columns.
  gemm(&b.turn, &a.turn, &columns, &rows, &inner, &alpha, right.const_data_ptr<float>(), &b.apart,
       left.const_data_ptr<float>(), &a.apart, &beta, result.mutable_data_ptr<float>(), &columns);
}

// The function that torch calls; null where its own products do not have the same bits.
Gemm* find_gemm() {
  Dl_info info;
  if (dladdr(reinterpret_cast<void*>(&at::globalContext), &info) == 0) return nullptr;
  void* library = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  auto* gemm = library == nullptr ? nullptr : reinterpret_cast<Gemm*>(dlsym(library, "sgemm_"));
  if (gemm == nullptr) return nullptr;
  const auto options = at::TensorOptions().dtype(at::kFloat);
  for (const int64_t inner : {5, 64, 300}) {
    const auto left = at::arange(7 * inner, options).mul_(0.37f).sin_().view({7, inner});
    const auto right = at::arange(inner * 33, options).mul_(0.73f).cos_().view({inner, 33});
    const auto mine = at::empty({7, 33}, options);
    multiply(gemm, left, *side_of(left), right, *side_of(right), 0.0f, mine);
    if (std::memcmp(mine.const_data_ptr(), at::mm(left, right).const_data_ptr(), mine.nbytes()) != 0) return nullptr;
  }
  return gemm;
}

Gemm* the_gemm() {
  static Gemm* const gemm = find_gemm();
  return at::globalContext().float32MatmulPrecision() == at::Float32MatmulPrecision::HIGHEST ? gemm : nullptr;
}

bool is_matrix(const at::Tensor& tensor) {
  return tensor.dim() == 2 && tensor.scalar_type() == at::kFloat && !tensor.is_neg();
}

std::optional<std::pair<Side, Side>> sides_of(const at::Tensor& left, const at::Tensor& right) {
  if (!is_matrix(left) || !is_matrix(right) || left.size(1) != right.size(0)) return std::nullopt;
  if (left.size(0) * left.size(1) * right.size(1) > kMostWork) return std::nullopt;
  const auto a = side_of(left), b = side_of(right);
  if (!a || !b) return std::nullopt;
  return std::make_pair(*a, *b);
}

at::Tensor small_mm(const at::Tensor& self, const at::Tensor& mat2) {
  const auto sides = sides_of(self, mat2);
  auto* gemm = sides ? the_gemm() : nullptr;
  if (gemm == nullptr) return at::mm(self, mat2);
  const at::Tensor result = at::detail::empty_cpu({self.size(0), mat2.size(1)}, at::kFloat);
  multiply(gemm, self, sides->first, mat2, sides->second, 0.0f, result);
  return result;
}

at::Tensor small_addmm(const at::Tensor& self, const at::Tensor& mat1, const at::Tensor& mat2, const at::Scalar& beta,
                       const at::Scalar& alpha) {
  const auto sides = sides_of(mat1, mat2);
  const bool row = self.dim() == 1 && self.scalar_type() == at::kFloat && self.is_contiguous() &&
                   self.size(0) == mat2.size(1) && beta.equal(1) && alpha.equal(1);
  auto* gemm = sides && row ? the_gemm() : nullptr;
  if (gemm == nullptr) return at::addmm(self, mat1, mat2, beta, alpha);
  const at::Tensor result = at::detail::empty_cpu({mat1.size(0), mat2.size(1)}, at::kFloat);
  const float* bias = self.const_data_ptr<float>();
  float* to = result.mutable_data_ptr<float>();
  for (int64_t i = 0; i < result.size(0); ++i) std::memcpy(to + i * result.size(1), bias, self.nbytes());
  multiply(gemm, mat1, sides->first, mat2, sides->second, 1.0f, result);
  return result;
}

// torch adds up to this many rows one after the other, and takes this many columns at once.
constexpr int64_t kFewRows = 15, kColumns = 64;

WATERFLOW_VECTORS void add_rows(const float* __restrict from, int64_t rows, int64_t columns, float* __restrict to) {
  for (int64_t j = 0; j < columns; ++j) to[j] = 0.0f + from[j];
  for (int64_t i = 1; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) to[j] += from[i * columns + j];
  }
}

at::Tensor sum_of_few_rows(const at::Tensor& self, at::OptionalIntArrayRef dim, bool keepdim,
                           std::optional<at::ScalarType> dtype) {
  const bool few = is_matrix(self) && self.is_contiguous() && dim && dim->size() == 1 && (*dim)[0] == 0 && !dtype &&
                   self.size(0) >= 1 && self.size(0) <= kFewRows && self.size(1) > 0 && self.size(1) % kColumns == 0 &&
                   self.numel() < at::internal::GRAIN_SIZE;
  if (!few) return at::sum(self, dim, keepdim, dtype);
  const int64_t columns = self.size(1);
  const int64_t sizes[] = {1, columns};
  const at::Tensor result = at::detail::empty_cpu(at::IntArrayRef(sizes).slice(keepdim ? 0 : 1), at::kFloat);
  add_rows(self.const_data_ptr<float>(), self.size(0), columns, result.mutable_data_ptr<float>());
  return result;
}

}  // namespace
}  // namespace waterflow

TORCH_LIBRARY_FRAGMENT(waterflow, m) {
  m.def("small_mm(Tensor self, Tensor mat2) -> Tensor");
  m.def("small_addmm(Tensor self, Tensor mat1, Tensor mat2, *, Scalar beta=1, Scalar alpha=1) -> Tensor");
  m.def("sum_of_few_rows(Tensor self, int[1]? dim, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor");
}
TORCH_LIBRARY_IMPL(waterflow, CPU, m) {
  m.impl("small_mm", &waterflow::small_mm);
  m.impl("small_addmm", &waterflow::small_addmm);
  m.impl("sum_of_few_rows", &waterflow::sum_of_few_rows);
}
