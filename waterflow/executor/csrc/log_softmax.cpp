// The logarithm of a softmax over rows, and its gradients: torch's exponentials take three times as long as ours, which
// round otherwise.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <cmath>
#include <limits>

#include "exponential.h"

namespace waterflow {
namespace {

bool can_make(const at::Tensor& rows, int64_t dim) {
#ifdef WATERFLOW_FUSED
  return can_fuse() && rows.scalar_type() == at::kFloat && rows.dim() > 0 && rows.numel() > 0 &&
         (dim == -1 || dim == rows.dim() - 1) && rows.is_contiguous() && rows.size(-1) >= 8;
#else
  return false;
#endif
}

#ifdef WATERFLOW_FUSED

// The last eight may be some of those before, too; those are not counted twice.
WATERFLOW_FUSED_INLINE __m256 uncounted(int64_t width, __m256 values) {
  const __m256i number = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i counted = _mm256_set1_epi32(static_cast<int>(7 - width % 8));
  return _mm256_and_ps(values, _mm256_castsi256_ps(_mm256_cmpgt_epi32(number, counted)));
}

WATERFLOW_FUSED_INLINE float sum_of(__m256 values) {
  alignas(32) float all[8];
  _mm256_store_ps(all, values);
  return ((all[0] + all[4]) + (all[1] + all[5])) + ((all[2] + all[6]) + (all[3] + all[7]));
}

WATERFLOW_FUSED_INLINE float most_of(const float* row, int64_t width) {
  __m256 most = _mm256_loadu_ps(row + width - 8);
  for (int64_t i = 0; i + 8 <= width; i += 8) most = _mm256_max_ps(most, _mm256_loadu_ps(row + i));
  alignas(32) float all[8];
  _mm256_store_ps(all, most);
  return *std::max_element(all, all + 8);
}

WATERFLOW_FUSED void forward(const float* row, float* to, int64_t width) {
  const __m256 most = _mm256_set1_ps(most_of(row, width));
  const auto exponential = [&](int64_t i)
                               WATERFLOW_FUSED { return exp_of(_mm256_sub_ps(_mm256_loadu_ps(row + i), most)); };
  __m256 sum = width % 8 == 0 ? _mm256_setzero_ps() : uncounted(width, exponential(width - 8));
  for (int64_t i = 0; i + 8 <= width; i += 8) sum = _mm256_add_ps(sum, exponential(i));
  const __m256 less = _mm256_set1_ps(std::log(sum_of(sum)));
  const auto make = [&](int64_t i) WATERFLOW_FUSED {
    _mm256_storeu_ps(to + i, _mm256_sub_ps(_mm256_sub_ps(_mm256_loadu_ps(row + i), most), less));
  };
  for (int64_t i = 0; i + 8 <= width; i += 8) make(i);
  if (width % 8 != 0) make(width - 8);
}

WATERFLOW_FUSED void backward(const float* gradients, const float* outputs, float* to, int64_t width) {
  __m256 sum = width % 8 == 0 ? _mm256_setzero_ps() : uncounted(width, _mm256_loadu_ps(gradients + width - 8));
  for (int64_t i = 0; i + 8 <= width; i += 8) sum = _mm256_add_ps(sum, _mm256_loadu_ps(gradients + i));
  const __m256 all = _mm256_set1_ps(sum_of(sum));
  const auto make = [&](int64_t i) WATERFLOW_FUSED {
    _mm256_storeu_ps(to + i,
                     _mm256_fnmadd_ps(exp_of(_mm256_loadu_ps(outputs + i)), all, _mm256_loadu_ps(gradients + i)));
  };
  for (int64_t i = 0; i + 8 <= width; i += 8) make(i);
  if (width % 8 != 0) make(width - 8);
}

#endif

// -- operators, with the arguments of those of torch

at::Tensor log_softmax(const at::Tensor& self, int64_t dim, bool half_to_float) {
#ifdef WATERFLOW_FUSED
  if (can_make(self, dim)) {
    const auto made = at::empty_like(self);
    const int64_t width = self.size(-1);
    const auto* from = self.const_data_ptr<float>();
    auto* to = made.mutable_data_ptr<float>();
    for (int64_t i = 0; i < self.numel(); i += width) forward(from + i, to + i, width);
    return made;
  }
#endif
  return at::_log_softmax(self, dim, half_to_float);
}

at::Tensor log_softmax_backward(const at::Tensor& grad_output, const at::Tensor& output, int64_t dim,
                                at::ScalarType input_dtype) {
#ifdef WATERFLOW_FUSED
  if (can_make(output, dim) && can_make(grad_output, dim) && input_dtype == at::kFloat) {
    const auto made = at::empty_like(output);
    const int64_t width = output.size(-1);
    const auto *gradients = grad_output.const_data_ptr<float>(), *outputs = output.const_data_ptr<float>();
    auto* to = made.mutable_data_ptr<float>();
    for (int64_t i = 0; i < output.numel(); i += width) backward(gradients + i, outputs + i, to + i, width);
    return made;
  }
#endif
  return at::_log_softmax_backward_data(grad_output, output, dim, input_dtype);
}

}  // namespace
}  // namespace waterflow

TORCH_LIBRARY_FRAGMENT(waterflow, m) {
  m.def("log_softmax(Tensor self, int dim, bool half_to_float) -> Tensor");
  m.def("log_softmax_backward(Tensor grad_output, Tensor output, int dim, ScalarType input_dtype) -> Tensor");
}
TORCH_LIBRARY_IMPL(waterflow, CPU, m) {
  m.impl("log_softmax", &waterflow::log_softmax);
  m.impl("log_softmax_backward", &waterflow::log_softmax_backward);
}
