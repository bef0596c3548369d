#include "state_bytes.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <cstring>

namespace waterflow {
namespace {

constexpr int64_t kAlignment =
    64;  // bytes: an element of a copy begins at a whole number of its size where that of the tensor does

// Bytes from a tensor's first element to behind its last one.
int64_t extent(const at::Tensor& tensor) {
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return (last + 1) * static_cast<int64_t>(tensor.element_size());
}

char* address(const at::Tensor& tensor) { return static_cast<char*>(tensor.mutable_data_ptr()); }

}  // namespace

StateBytes::StateBytes(const std::vector<at::Tensor>& tensors) {
  spans_.reserve(tensors.size());
  storages_.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() == 0) continue;
    TORCH_CHECK(tensor.device().is_cpu() && tensor.layout() == at::kStrided,
                "only dense tensors in host memory have bytes to copy; got one on ", tensor.device());
    spans_.push_back({address(tensor), extent(tensor), 0});
    storages_.push_back(tensor.storage());
  }
  std::sort(spans_.begin(), spans_.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
  std::vector<Span> apart;
  apart.reserve(spans_.size());
  for (const Span& span : spans_) {
    if (!apart.empty() && span.begin < apart.back().begin + apart.back().size) {
      apart.back().size = std::max(apart.back().size, span.begin + span.size - apart.back().begin);
    } else {
      apart.push_back(span);
    }
  }
  for (Span& span : apart) {
    const auto odd = static_cast<int64_t>(reinterpret_cast<uintptr_t>(span.begin) % kAlignment);
    span.place = bytes_ + (odd - bytes_ % kAlignment + kAlignment) % kAlignment;
    bytes_ = span.place + span.size;
  }
  spans_ = std::move(apart);
}

at::Tensor StateBytes::copy() const {
  at::Tensor made = at::empty({bytes_}, at::kByte);
  auto* to = static_cast<char*>(made.mutable_data_ptr());
  for (const Span& span : spans_) std::memcpy(to + span.place, span.begin, span.size);
  return made;
}

void StateBytes::put(const at::Tensor& copy) const {
  const auto* from = static_cast<const char*>(copy.const_data_ptr());
  for (const Span& span : spans_) std::memcpy(span.begin, from + span.place, span.size);
}

bool StateBytes::is_as(const at::Tensor& copy) const {
  const auto* then = static_cast<const char*>(copy.const_data_ptr());
  return std::all_of(spans_.begin(), spans_.end(),
                     [then](const Span& span) { return std::memcmp(span.begin, then + span.place, span.size) == 0; });
}

at::Tensor StateBytes::then(const at::Tensor& copy, const at::Tensor& tensor) const {
  const char* begin = address(tensor);
  auto behind = std::upper_bound(spans_.begin(), spans_.end(), begin,
                                 [](const char* at, const Span& span) { return at < span.begin; });
  TORCH_CHECK(behind != spans_.begin() && begin < std::prev(behind)->begin + std::prev(behind)->size,
              "the tensor does not lie in this memory");
  const Span& span = *std::prev(behind);
  const int64_t place = (span.place + (begin - span.begin)) / static_cast<int64_t>(tensor.element_size());
  return at::empty({0}, tensor.options().requires_grad(false))
      .set_(copy.storage(), place, tensor.sizes(), tensor.strides());
}

}  // namespace waterflow
