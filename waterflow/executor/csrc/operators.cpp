// Operators of waterflow's own: the same bits as those that they stand for, with less on the way.
#include <ATen/ATen.h>
#include <torch/library.h>

namespace waterflow {
namespace {

// Counts of updates: `_foreach_add_` goes through a whole operator for each, for one addition.
void count_up(at::TensorList counters, const at::Scalar& by) {
  const float step = by.to<float>();
  for (const auto& counter : counters) *counter.mutable_data_ptr<float>() += step;
}

}  // namespace
}  // namespace waterflow

TORCH_LIBRARY_FRAGMENT(waterflow, m) { m.def("count_up_(Tensor(a!)[] self, Scalar scalar) -> ()"); }
TORCH_LIBRARY_IMPL(waterflow, CPU, m) { m.impl("count_up_", &waterflow::count_up); }
