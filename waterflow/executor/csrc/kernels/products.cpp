// Small products and sums of matrices: the calls that torch makes in the end, without what it does on the way.

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <dlfcn.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

#include "waterflow/executor/csrc/kernels/small_gemm.h"
#include "waterflow/executor/csrc/program/program.h"

namespace waterflow {
namespace {

constexpr int64_t kMostWork = 1 << 21;  // multiplications: in larger products the way does not count

// As torch chooses it; none for matrices that it would copy, or where a size of one leaves it a choice.
std::optional<Side> side_of(const at::Tensor& matrix) {
  const int64_t rows = matrix.size(0), columns = matrix.size(1);
  if (rows < 2 || columns < 2) return std::nullopt;
  if (matrix.stride(1) == 1 && matrix.stride(0) >= columns) return Side{'n', static_cast<int>(matrix.stride(0))};
  if (matrix.stride(0) == 1 && matrix.stride(1) >= rows) return Side{'t', static_cast<int>(matrix.stride(1))};
  return std::nullopt;
}

Product product_of(const at::Tensor& left, Side a, const at::Tensor& right, Side b, const float* bias,
                   const at::Tensor& result) {
  return {left.const_data_ptr<float>(),
          a,
          right.const_data_ptr<float>(),
          b,
          bias,
          result.mutable_data_ptr<float>(),
          static_cast<int>(result.size(0)),
          static_cast<int>(result.size(1)),
          static_cast<int>(left.size(1))};
}

void multiply(Gemm* gemm, const Product& product) {
  if (!multiply_shortly(product, gemm)) product.by(gemm);
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
    product_of(left, *side_of(left), right, *side_of(right), nullptr, mine).by(gemm);
    if (std::memcmp(mine.const_data_ptr(), at::mm(left, right).const_data_ptr(), mine.nbytes()) != 0) return nullptr;
  }
  return gemm;
}

enum class Precision : char { unknown, highest, other };
thread_local Precision t_precision = Precision::unknown;

Precision precision_now() {
  const bool highest = at::globalContext().float32MatmulPrecision() == at::Float32MatmulPrecision::HIGHEST;
  return highest ? Precision::highest : Precision::other;
}

Gemm* the_gemm() {
  static Gemm* const gemm = find_gemm();
  const auto precision = t_precision == Precision::unknown ? precision_now() : t_precision;
  return precision == Precision::highest ? gemm : nullptr;
}

bool is_matrix(const at::Tensor& tensor) {
  return tensor.dim() == 2 && tensor.scalar_type() == at::kFloat && has_plain_memory(tensor);
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
  multiply(gemm, product_of(self, sides->first, mat2, sides->second, nullptr, result));
  return result;
}

at::Tensor small_addmm(const at::Tensor& self, const at::Tensor& mat1, const at::Tensor& mat2, const at::Scalar& beta,
                       const at::Scalar& alpha) {
  const auto sides = sides_of(mat1, mat2);
  const bool row = self.dim() == 1 && self.scalar_type() == at::kFloat && has_plain_memory(self) &&
                   self.is_contiguous() && self.size(0) == mat2.size(1) && beta.equal(1) && alpha.equal(1);
  auto* gemm = sides && row ? the_gemm() : nullptr;
  if (gemm == nullptr) return at::addmm(self, mat1, mat2, beta, alpha);
  const at::Tensor result = at::detail::empty_cpu({mat1.size(0), mat2.size(1)}, at::kFloat);
  multiply(gemm, product_of(mat1, sides->first, mat2, sides->second, self.const_data_ptr<float>(), result));
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

bool has_few_rows(const at::Tensor& matrix) {
  return is_matrix(matrix) && matrix.is_contiguous() && matrix.size(0) >= 1 && matrix.size(0) <= kFewRows &&
         matrix.size(1) > 0 && matrix.size(1) % kColumns == 0 && matrix.numel() < at::internal::GRAIN_SIZE;
}

at::Tensor sum_rows(const at::Tensor& matrix, bool keepdim) {
  const int64_t columns = matrix.size(1);
  const int64_t sizes[] = {1, columns};
  const at::Tensor result = at::detail::empty_cpu(at::IntArrayRef(sizes).slice(keepdim ? 0 : 1), at::kFloat);
  add_rows(matrix.const_data_ptr<float>(), matrix.size(0), columns, result.mutable_data_ptr<float>());
  return result;
}

at::Tensor sum_of_few_rows(const at::Tensor& self, at::OptionalIntArrayRef dim, bool keepdim,
                           std::optional<at::ScalarType> dtype) {
  const bool rows = dim && dim->size() == 1 && (*dim)[0] == 0 && !dtype && has_few_rows(self);
  return rows ? sum_rows(self, keepdim) : at::sum(self, dim, keepdim, dtype);
}

// Without a vector of the dimensions.
at::Tensor sum_directly(const c10::IValue* const* arguments) {
  const auto& self = arguments[0]->toTensor();
  const auto& dim = *arguments[1];
  const bool keepdim = arguments[2]->toBool();
  const bool plain = dim.isIntList() && arguments[3]->isNone();
  if (plain && dim.toListRef().size() == 1 && dim.toListRef()[0].toInt() == 0 && has_few_rows(self)) {
    return sum_rows(self, keepdim);
  }
  const auto dims = dim.to<std::optional<std::vector<int64_t>>>();
  return sum_of_few_rows(self, dims ? at::OptionalIntArrayRef(*dims) : std::nullopt, keepdim,
                         arguments[3]->to<std::optional<at::ScalarType>>());
}

}  // namespace

ProductsScope::ProductsScope() : known_before_(t_precision != Precision::unknown) {
  if (!known_before_) t_precision = precision_now();
}

ProductsScope::~ProductsScope() {
  if (!known_before_) t_precision = Precision::unknown;
}

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

namespace waterflow {
namespace {

const RegisterDirectCall kDirect[] = {
    {"waterflow::small_mm", &Direct<&small_mm>::call},
    {"waterflow::small_addmm", &Direct<&small_addmm>::call},
    {"waterflow::sum_of_few_rows", &sum_directly},
};

}  // namespace

// Products of matrices by oneDNN where torch would ask another library: on some processors it is twice as fast. Its
// sums are rounded in another order.

namespace {

at::Tensor product(const at::Tensor& left, const at::Tensor& right, const std::optional<at::Tensor>& bias) {
  using Form = at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, std::string_view,
                          c10::List<std::optional<at::Scalar>>, std::optional<std::string_view>);
  static const auto form =
      c10::Dispatcher::singleton().findSchemaOrThrow("mkldnn::_linear_pointwise", "").typed<Form>();
  return form.call(left, right.t(), bias, "none", c10::List<std::optional<at::Scalar>>(), "");
}

at::Tensor matrix_product(const at::Tensor& self, const at::Tensor& mat2) {
  return product(self, mat2, std::optional<at::Tensor>());
}

at::Tensor linear_map(const at::Tensor& bias, const at::Tensor& self, const at::Tensor& mat2, const at::Scalar& beta,
                      const at::Scalar& alpha) {
  return product(self, mat2, std::optional<at::Tensor>(bias));
}

}  // namespace
}  // namespace waterflow

TORCH_LIBRARY_FRAGMENT(waterflow, m) {
  m.def("mm(Tensor self, Tensor mat2) -> Tensor");
  // With beta and alpha of one, and a bias of one dimension.
  m.def("addmm(Tensor self, Tensor mat1, Tensor mat2, *, Scalar beta=1, Scalar alpha=1) -> Tensor");
}
TORCH_LIBRARY_IMPL(waterflow, CPU, m) {
  m.impl("mm", &waterflow::matrix_product);
  m.impl("addmm", &waterflow::linear_map);
}
