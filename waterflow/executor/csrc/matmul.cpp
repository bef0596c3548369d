// Products of matrices by oneDNN where torch would ask another library: on some processors it is twice as fast. Its
// sums are rounded in another order.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace waterflow {
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
