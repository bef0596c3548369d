// Derivatives whose formulas look at values: autograd's own, on real tensors.

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/library.h>

namespace waterflow {
namespace {

at::Tensor called(c10::string_view name, const at::Tensor& self, std::optional<int64_t> dim) {
  if (name == "prod") return dim ? at::prod(self, *dim, /*keepdim=*/true) : at::prod(self);
  if (name == "cumprod") return at::cumprod(self, dim.value());
  if (name == "max") return at::max(self);
  if (name == "min") return at::min(self);
  if (name == "median") return at::median(self);
  TORCH_INTERNAL_ASSERT(name == "nanmedian");
  return at::nanmedian(self);
}

// The gradient of `self` where `gradient` is that of the function's result.
at::Tensor derivative(const at::Tensor& gradient, const at::Tensor& self, c10::string_view name,
                      std::optional<int64_t> dim) {
  const c10::InferenceMode with_autograd(false);
  const auto node = called(name, self.detach().requires_grad_(), dim).grad_fn();
  const at::NoGradGuard once;
  return (*node)({gradient}).front();
}

}  // namespace
}  // namespace waterflow

TORCH_LIBRARY_FRAGMENT(waterflow, m) {
  m.def("derivative(Tensor gradient, Tensor self, str name, int? dim) -> Tensor");
}
TORCH_LIBRARY_IMPL(waterflow, CompositeExplicitAutograd, m) { m.impl("derivative", &waterflow::derivative); }
