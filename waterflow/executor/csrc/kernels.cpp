// Kernels of waterflow's own for the CPU: the bits of torch's, in less time. What they are not made for goes to
// torch's.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <optional>
#include <tuple>

#include "direct_call.h"
#include "vectors.h"

namespace waterflow {
namespace {

// -- elementwise

// Larger tensors torch shares out among threads.
bool is_small_float(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat && tensor.numel() < at::internal::GRAIN_SIZE && has_plain_memory(tensor);
}

bool has_single(const at::Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return std::find(sizes.begin(), sizes.end(), 1) != sizes.end();
}

// Tensors that torch walks in the order of memory, and whose results have their strides; dimensions of one element
// may have any.
bool is_straight(const at::Tensor& tensor) {
  return is_small_float(tensor) &&
         (tensor.is_contiguous() || (tensor.is_non_overlapping_and_dense() && !has_single(tensor)));
}

bool are_straight(const at::Tensor& self, const at::Tensor& other) {
  return is_straight(self) && is_straight(other) && self.sizes().equals(other.sizes()) &&
         (self.strides().equals(other.strides()) || (self.is_contiguous() && other.is_contiguous()));
}

at::Tensor result_like(const at::Tensor& tensor) {
  if (tensor.is_contiguous()) return at::detail::empty_cpu(tensor.sizes(), at::kFloat);
  return at::detail::empty_strided_cpu(tensor.sizes(), tensor.strides(), at::kFloat);
}

// What a loop writes, given all but where to and how many.
template <typename Loop, typename... Given>
at::Tensor filled(Loop* loop, const at::Tensor& like, Given... given) {
  const auto result = result_like(like);
  loop(given..., result.mutable_data_ptr<float>(), like.numel());
  return result;
}

WATERFLOW_VECTORS void relu_floats(const float* __restrict from, float* __restrict to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[i] < 0.0f ? 0.0f : from[i];
}

at::Tensor relu(const at::Tensor& self) {
  if (!is_straight(self)) return at::relu(self);
  return filled(relu_floats, self, self.const_data_ptr<float>());
}

WATERFLOW_VECTORS void pass_floats(const float* __restrict gradients, const float* __restrict values, float threshold,
                                   float* __restrict to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = values[i] <= threshold ? 0.0f : gradients[i];
}

at::Tensor threshold_backward(const at::Tensor& gradient, const at::Tensor& self, const at::Scalar& threshold) {
  if (!are_straight(gradient, self)) return at::threshold_backward(gradient, self, threshold);
  return filled(pass_floats, self, gradient.const_data_ptr<float>(), self.const_data_ptr<float>(),
                threshold.to<float>());
}

WATERFLOW_VECTORS void mul_floats(const float* __restrict a, const float* __restrict b, float* __restrict to,
                                  int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = a[i] * b[i];
}

at::Tensor mul(const at::Tensor& self, const at::Tensor& other) {
  if (!are_straight(self, other)) return at::mul(self, other);
  return filled(mul_floats, self, self.const_data_ptr<float>(), other.const_data_ptr<float>());
}

WATERFLOW_VECTORS void add_floats(const float* __restrict a, const float* __restrict b, float* __restrict to,
                                  int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = a[i] + b[i];
}

at::Tensor add(const at::Tensor& self, const at::Tensor& other, const at::Scalar& alpha) {
  if (!are_straight(self, other) || !alpha.equal(1)) return at::add(self, other, alpha);
  return filled(add_floats, self, self.const_data_ptr<float>(), other.const_data_ptr<float>());
}

WATERFLOW_VECTORS void scale_floats(const float* __restrict from, float by, float* __restrict to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[i] * by;
}

at::Tensor mul_number(const at::Tensor& self, const at::Scalar& other) {
  const bool whole = other.isIntegral(false);
  if (!is_straight(self) || has_single(self) || !(whole || other.isFloatingPoint())) return at::mul(self, other);
  const float by = whole ? static_cast<float>(other.toLong()) : static_cast<float>(other.toDouble());
  return filled(scale_floats, self, self.const_data_ptr<float>(), by);
}

// -- copies

// `from`, walked in the order of its dimensions, to consecutive places; returns the place behind the last.
float* copy_in_order(const float* from, const int64_t* sizes, const int64_t* strides, int64_t dims, float* to) {
  const int64_t count = sizes[0], stride = strides[0];
  if (dims > 1) {
    for (int64_t i = 0; i < count; ++i) to = copy_in_order(from + i * stride, sizes + 1, strides + 1, dims - 1, to);
    return to;
  }
  if (stride == 1) {
    std::memcpy(to, from, sizeof(float) * count);
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = from[i * stride];
  }
  return to + count;
}

at::Tensor clone(const at::Tensor& self, std::optional<at::MemoryFormat> format) {
  if (!is_small_float(self) || self.numel() == 0 || format != at::MemoryFormat::Contiguous) {
    return at::clone(self, format);
  }
  c10::SmallVector<int64_t, 8> sizes, strides;
  for (int64_t dim = 0; dim < self.dim(); ++dim) {
    const int64_t size = self.size(dim), stride = self.stride(dim);
    if (size == 1) continue;
    if (!sizes.empty() && strides.back() == stride * size) {
      sizes.back() *= size;
      strides.back() = stride;
    } else {
      sizes.push_back(size);
      strides.push_back(stride);
    }
  }
  if (sizes.empty()) {
    sizes.push_back(1);
    strides.push_back(1);
  }
  const at::Tensor result = at::detail::empty_cpu(self.sizes(), at::kFloat);
  copy_in_order(self.const_data_ptr<float>(), sizes.data(), strides.data(), static_cast<int64_t>(sizes.size()),
                result.mutable_data_ptr<float>());
  return result;
}

// -- softmax and pooling

// Softmax, and zeros in the place of rows that are masked out as a whole.
at::Tensor safe_softmax(const at::Tensor& self, int64_t dim, std::optional<at::ScalarType> dtype) {
  if (self.scalar_type() != at::kFloat || !has_plain_memory(self) || dtype || self.dim() == 0 || self.numel() == 0 ||
      has_single(self) || !self.is_contiguous() || (dim != -1 && dim != self.dim() - 1)) {
    return at::_safe_softmax(self, dim, dtype);
  }
  const auto result = at::_softmax(self, dim, false);
  const auto* from = self.const_data_ptr<float>();
  auto* to = result.mutable_data_ptr<float>();
  const int64_t length = self.size(-1);
  constexpr float kMasked = -std::numeric_limits<float>::infinity();
  for (int64_t begin = 0; begin < self.numel(); begin += length) {
    int64_t i = 0;
    while (i < length && from[begin + i] == kMasked) ++i;
    if (i == length) std::fill_n(to + begin, length, 0.0f);
  }
  return result;
}

// A later value wins if it is greater or no number. In bits: a branch would be guessed wrong half of the time.
WATERFLOW_INLINE void take_later(float value, int32_t place, float& most, int32_t& found) {
  const int32_t wins = -static_cast<int32_t>((value > most) | (value != value));
  int32_t bits, before;
  std::memcpy(&bits, &value, sizeof(bits));
  std::memcpy(&before, &most, sizeof(before));
  bits = (bits & wins) | (before & ~wins);
  std::memcpy(&most, &bits, sizeof(bits));
  found = (place & wins) | (found & ~wins);
}

// The four values of each 2x2 square, and the place of the first in its plane.
struct Squares {
  static constexpr int64_t kMost = 512;
  float a[kMost], b[kMost], c[kMost], d[kMost];
  int32_t first[kMost];
};

WATERFLOW_VECTORS void pool_squares(const Squares& given, int32_t width, int64_t count, float* __restrict to,
                                    int64_t* __restrict indices) {
  for (int64_t i = 0; i < count; ++i) {
    float most = given.a[i];
    int32_t found = 0;
    take_later(given.b[i], 1, most, found);
    take_later(given.c[i], width, most, found);
    take_later(given.d[i], width + 1, most, found);
    to[i] = most;
    indices[i] = given.first[i] + found;
  }
}

std::tuple<at::Tensor, at::Tensor> max_pool(const at::Tensor& self, at::IntArrayRef kernel, at::IntArrayRef stride,
                                            at::IntArrayRef padding, at::IntArrayRef dilation, bool ceil_mode) {
  const auto all = [](at::IntArrayRef values, int64_t value) {
    return std::all_of(values.begin(), values.end(), [value](int64_t v) { return v == value; });
  };
  const int64_t dims = self.dim();
  const int64_t height = dims == 4 ? self.size(2) : 0, width = dims == 4 ? self.size(3) : 0;
  if (self.scalar_type() != at::kFloat || self.numel() == 0 || height < 2 || width < 2 ||
      height * width > std::numeric_limits<int32_t>::max() || !self.is_contiguous() ||
      self.suggest_memory_format() != at::MemoryFormat::Contiguous || kernel.empty() || !all(kernel, 2) ||
      !all(stride, 2) || !all(padding, 0) || !all(dilation, 1) || (ceil_mode && (height % 2 || width % 2))) {
    return at::max_pool2d_with_indices(self, kernel, stride, padding, dilation, ceil_mode);
  }
  const int64_t rows = height / 2, columns = width / 2;
  const std::array<int64_t, 4> sizes{self.size(0), self.size(1), rows, columns};
  const at::Tensor result = at::detail::empty_cpu(sizes, at::kFloat);
  const at::Tensor indices = at::detail::empty_cpu(sizes, at::kLong);
  const auto* from = self.const_data_ptr<float>();
  auto* to = result.mutable_data_ptr<float>();
  auto* places = indices.mutable_data_ptr<int64_t>();
  // Rows may be short: squares of many are gathered first.
  Squares squares;
  int64_t row = 0, column = 0;
  for (int64_t done = 0; done < result.numel();) {
    const int64_t count = std::min(Squares::kMost, result.numel() - done);
    for (int64_t filled = 0; filled < count;) {
      const int64_t taken = std::min(columns - column, count - filled);
      const int64_t first = 2 * row * width + 2 * column;
      const auto *upper = from + first, *lower = upper + width;
      for (int64_t i = 0; i < taken; ++i, ++filled) {
        squares.a[filled] = upper[2 * i];
        squares.b[filled] = upper[2 * i + 1];
        squares.c[filled] = lower[2 * i];
        squares.d[filled] = lower[2 * i + 1];
        squares.first[filled] = static_cast<int32_t>(first + 2 * i);
      }
      column += taken;
      if (column < columns) continue;
      column = 0;
      if (++row < rows) continue;
      row = 0;
      from += height * width;
    }
    pool_squares(squares, static_cast<int32_t>(width), count, to + done, places + done);
    done += count;
  }
  return {result, indices};
}

}  // namespace
}  // namespace waterflow

TORCH_LIBRARY_FRAGMENT(waterflow, m) {
  m.def("relu(Tensor self) -> Tensor");
  m.def("threshold_backward(Tensor grad_output, Tensor self, Scalar threshold) -> Tensor");
  m.def("mul(Tensor self, Tensor other) -> Tensor");
  m.def("add(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor");
  m.def("mul_number(Tensor self, Scalar other) -> Tensor");
  m.def("clone(Tensor self, *, MemoryFormat? memory_format=None) -> Tensor");
  m.def("_safe_softmax(Tensor self, int dim, ScalarType? dtype=None) -> Tensor");
  m.def(
      "max_pool2d_with_indices(Tensor self, int[2] kernel_size, int[2] stride=[], int[2] padding=0, "
      "int[2] dilation=1, bool ceil_mode=False) -> (Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(waterflow, CPU, m) {
  m.impl("relu", &waterflow::relu);
  m.impl("threshold_backward", &waterflow::threshold_backward);
  m.impl("mul", &waterflow::mul);
  m.impl("add", &waterflow::add);
  m.impl("mul_number", &waterflow::mul_number);
  m.impl("clone", &waterflow::clone);
  m.impl("_safe_softmax", &waterflow::safe_softmax);
  m.impl("max_pool2d_with_indices", &waterflow::max_pool);
}

namespace waterflow {
namespace {

const RegisterDirectCall kDirect[] = {
    {"waterflow::relu", &Direct<&relu>::call},
    {"waterflow::threshold_backward", &Direct<&threshold_backward>::call},
    {"waterflow::mul", &Direct<&mul>::call},
    {"waterflow::add", &Direct<&add>::call},
    {"waterflow::mul_number", &Direct<&mul_number>::call},
    {"waterflow::clone", &Direct<&clone>::call},
    {"waterflow::_safe_softmax", &Direct<&safe_softmax>::call},
};

}  // namespace
}  // namespace waterflow
