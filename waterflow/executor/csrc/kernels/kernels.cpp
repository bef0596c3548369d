// Kernels of waterflow's own for the CPU: the bits of torch's, in less time. What they are not made for goes to
// torch's.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <mutex>
#include <optional>
#include <tuple>
#include <utility>

#include "waterflow/executor/csrc/kernels/small_gemm.h"
#include "waterflow/executor/csrc/program/program.h"

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

// Random masks on the CPU: the bits of torch's, and its generator's, in less time.

namespace {

constexpr int kWords = at::MERSENNE_STATE_N, kAhead = at::MERSENNE_STATE_M;

WATERFLOW_INLINE uint32_t twisted(uint32_t u, uint32_t v) {
  return (((u & at::UMASK) | (v & at::LMASK)) >> 1) ^ (-(v & 1) & at::MATRIX_A);
}

// at::mt19937's next state, from Matsumoto and Nishimura's recurrence.
WATERFLOW_VECTORS void twist(uint32_t* __restrict p) {
  const uint32_t* q = p;  // read before it is written, or 227 words behind
  constexpr int kBehind = kWords - kAhead;
#pragma GCC ivdep
  for (int j = 0; j < kBehind; ++j) p[j] = q[j + kAhead] ^ twisted(q[j], q[j + 1]);
  for (int begin = kBehind; begin < kWords - 1; begin += kBehind) {
    const int end = std::min(begin + kBehind, kWords - 1);
#pragma GCC ivdep
    for (int j = begin; j < end; ++j) p[j] = q[j - kBehind] ^ twisted(q[j], q[j + 1]);
  }
  p[kWords - 1] = p[kAhead - 1] ^ twisted(p[kWords - 1], p[0]);
}

WATERFLOW_VECTORS void temper(const uint32_t* __restrict from, uint32_t* __restrict to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    uint32_t y = from[i];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680;
    y ^= (y << 15) & 0xefc60000;
    to[i] = y ^ (y >> 18);
  }
}

// The next `count` words of the generator behind `state`.
void draw(at::mt19937_data_pod& state, uint32_t* to, int64_t count) {
  while (count > 0) {
    int64_t ready = state.left_ - 1;
    if (ready == 0) {
      twist(state.state_.data());
      ready = kWords;
      state.left_ = kWords + 1;
      state.next_ = 0;
    }
    const int64_t taken = std::min(ready, count);
    temper(state.state_.data() + state.next_, to, taken);
    state.left_ -= static_cast<int>(taken);
    state.next_ += static_cast<uint32_t>(taken);
    to += taken;
    count -= taken;
  }
}

// A uniform number is 53 bits of two words, the higher first; `high` and `low` are the bound's.
template <typename T>
WATERFLOW_INLINE void choose(const uint32_t* __restrict words, int64_t count, uint32_t high, uint32_t low, T yes, T no,
                             T* __restrict to) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t top = words[2 * i] & 0x1fffff, bottom = words[2 * i + 1];
    to[i] = ((top < high) | ((top == high) & (bottom < low))) ? yes : no;
  }
}
WATERFLOW_VECTORS void choose_floats(const uint32_t* words, int64_t count, uint32_t high, uint32_t low, float yes,
                                     float no, float* to) {
  choose(words, count, high, low, yes, no, to);
}
WATERFLOW_VECTORS void choose_doubles(const uint32_t* words, int64_t count, uint32_t high, uint32_t low, double yes,
                                      double no, double* to) {
  choose(words, count, high, low, yes, no, to);
}

// `yes` with probability p, else `no`, for each element in the order of memory.
void fill_mask(const at::TensorBase& mask, double p, double yes, double no,
               const std::optional<at::Generator>& generator) {
  constexpr int64_t kBlock = 512;
  uint32_t words[2 * kBlock];
  const auto bound = static_cast<uint64_t>(std::ceil(std::ldexp(p, 53)));
  const auto high = static_cast<uint32_t>(bound >> 32), low = static_cast<uint32_t>(bound);
  auto* own = at::get_generator_or_default<at::CPUGeneratorImpl>(generator, at::detail::getDefaultCPUGenerator());
  std::lock_guard<std::mutex> lock(own->mutex_);
  at::mt19937 engine = own->engine();
  at::mt19937_data_pod state = engine.data();
  const bool floats = mask.scalar_type() == at::kFloat;
  void* data = mask.mutable_data_ptr();
  const int64_t numel = mask.numel();
  for (int64_t begin = 0; begin < numel; begin += kBlock) {
    const int64_t count = std::min(kBlock, numel - begin);
    draw(state, words, 2 * count);
    if (floats) {
      choose_floats(words, count, high, low, static_cast<float>(yes), static_cast<float>(no),
                    static_cast<float*>(data) + begin);
    } else {
      choose_doubles(words, count, high, low, yes, no, static_cast<double*>(data) + begin);
    }
  }
  engine.set_data(state);
  own->set_engine(engine);
}

// On other CPUs torch seeds a generator of MKL's from one word. Asks torch's allocators for nothing.
bool torch_draws_word_by_word() {
  static const bool does = [] {
    constexpr int64_t kTried = 701;  // more than one state of the generator
    auto generator = at::detail::createCPUGenerator(2147483647), other = at::detail::createCPUGenerator(2147483647);
    auto &ours = *generator.get<at::CPUGeneratorImpl>(), &theirs = *other.get<at::CPUGeneratorImpl>();
    std::array<double, kTried> drawn{}, expected{};
    auto mask = at::from_blob(drawn.data(), {kTried}, at::kDouble);
    fill_mask(mask, 0.7, 1, 0, generator);
    at::from_blob(expected.data(), {kTried}, at::kDouble).bernoulli_(0.7, other);
    return drawn == expected && ours.random64() == theirs.random64();
  }();
  return does;
}

bool can_draw(const at::Tensor& like, double p) {
  return (like.scalar_type() == at::kFloat || like.scalar_type() == at::kDouble) && p >= 0 && p <= 1 &&
         like.is_non_overlapping_and_dense() && torch_draws_word_by_word();
}

at::Tensor& bernoulli(at::Tensor& self, double p, std::optional<at::Generator> generator) {
  if (!can_draw(self, p)) return self.bernoulli_(p, std::move(generator));
  fill_mask(self, p, 1, 0, generator);
  return self;
}

// empty_like(like).bernoulli_(keep).div_(keep)
at::Tensor dropout_mask(const at::Tensor& like, double keep, std::optional<at::Generator> generator) {
  if (!can_draw(like, keep)) return at::empty_like(like).bernoulli_(keep, std::move(generator)).div_(keep);
  const auto mask = at::Tensor(at::detail::empty_strided_cpu(like.sizes(), like.strides(), like.scalar_type()));
  if (like.scalar_type() == at::kFloat) {
    const auto divisor = static_cast<float>(keep);
    fill_mask(mask, keep, 1.0f / divisor, 0.0f / divisor, generator);
  } else {
    fill_mask(mask, keep, 1.0 / keep, 0.0 / keep, generator);
  }
  return mask;
}

}  // namespace
}  // namespace waterflow

TORCH_LIBRARY_FRAGMENT(waterflow, m) {
  m.def("bernoulli_(Tensor(a!) self, float p=0.5, *, Generator? generator=None) -> Tensor(a!)");
  m.def("dropout_mask(Tensor like, float p, *, Generator? generator=None) -> Tensor");
}
TORCH_LIBRARY_IMPL(waterflow, CPU, m) {
  m.impl("bernoulli_", &waterflow::bernoulli);
  m.impl("dropout_mask", &waterflow::dropout_mask);
}

namespace waterflow {

// Operators of waterflow's own: the same bits as those that they stand for, with less on the way.

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

namespace waterflow {

// A step's memory on its way to host memory and back: the same bytes, sizes and strides.

namespace {

constexpr size_t kAlignment = 64;

at::Tensor bytes_of(const at::Tensor& tensor) {
  const auto options = at::TensorOptions().dtype(at::kByte).device(tensor.device());
  return at::empty({0}, options).set_(tensor.storage(), 0, {static_cast<int64_t>(tensor.storage().nbytes())}, {1});
}

at::Tensor same_form(const at::Tensor& tensor, c10::Storage storage, c10::DispatchKeySet keys) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return made;
}

// Of no allocator that counts or plans.
c10::Storage host_storage(size_t bytes) {
  void* const memory = std::aligned_alloc(kAlignment, (bytes + kAlignment) / kAlignment * kAlignment);
  TORCH_CHECK(memory != nullptr, "the host has no ", bytes, " bytes for what a step spills; raise its quota");
  c10::DataPtr owned(memory, memory, &std::free, c10::Device(at::kCPU));
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes, std::move(owned), nullptr, false);
}

at::Tensor to_host(const at::Tensor& tensor) {
  const size_t bytes = tensor.storage().nbytes();
  auto storage = host_storage(bytes);
  std::memcpy(storage.mutable_data(), tensor.storage().data(), bytes);
  return same_form(tensor, std::move(storage), tensor.key_set());
}

// Pinned, and behind what the stream has to do: torch's host allocator keeps the memory until the copies are done.
at::Tensor to_host_from_device(const at::Tensor& tensor) {
  const auto source = bytes_of(tensor);
  const auto host =
      at::empty(source.sizes(), at::TensorOptions().dtype(at::kByte).device(at::kCPU).pinned_memory(true));
  host.copy_(source, /*non_blocking=*/true);
  return same_form(tensor, host.storage(), host.key_set());
}

at::Tensor from_host(const at::Tensor& host, at::Device device) {
  const int64_t bytes = static_cast<int64_t>(host.storage().nbytes());
  const auto made = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
  if (device.is_cpu()) {
    std::memcpy(made.mutable_data_ptr(), host.storage().data(), static_cast<size_t>(bytes));
  } else {
    made.copy_(bytes_of(host), /*non_blocking=*/true);
  }
  return same_form(host, made.storage(), made.key_set());
}

}  // namespace
}  // namespace waterflow

TORCH_LIBRARY_FRAGMENT(waterflow, m) {
  m.def("to_host(Tensor self) -> Tensor");
  m.def("from_host(Tensor self, Device device) -> Tensor");
}
TORCH_LIBRARY_IMPL(waterflow, CPU, m) {
  m.impl("to_host", &waterflow::to_host);
  m.impl("from_host", &waterflow::from_host);
}
TORCH_LIBRARY_IMPL(waterflow, CUDA, m) { m.impl("to_host", &waterflow::to_host_from_device); }
