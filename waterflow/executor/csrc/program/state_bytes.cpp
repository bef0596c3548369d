#include "waterflow/executor/csrc/program/state_bytes.h"

#include <ATen/Functions.h>
#include <ATen/native/Resize.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
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

}  // namespace

StateBytes::StateBytes(const pybind11::sequence& tensors) {
  forms_.reserve(tensors.size());
  for (const auto& given : tensors) {
    TORCH_CHECK_TYPE(THPVariable_Check(given.ptr()), "only tensors have bytes to copy");
    const at::Tensor& tensor = THPVariable_Unpack(held_(given.ptr()));
    TORCH_CHECK(tensor.device().is_cpu() && tensor.layout() == at::kStrided,
                "only dense tensors in host memory have bytes to copy; got one on ", tensor.device());
    const c10::Storage& storage = tensor.storage();
    forms_.push_back(
        {&tensor, storage, tensor.sizes().vec(), tensor.strides().vec(), tensor.storage_offset(), storage.nbytes()});
    if (tensor.numel() == 0) continue;
    const int64_t begin = tensor.storage_offset() * static_cast<int64_t>(tensor.element_size());
    spans_.push_back({forms_.size() - 1, begin, extent(tensor), 0});
  }
  std::sort(spans_.begin(), spans_.end(), [this](const Span& a, const Span& b) { return address(a) < address(b); });
  std::vector<Span> apart;
  for (const Span& span : spans_) {
    if (apart.empty() || address(span) >= address(apart.back()) + apart.back().size) {
      const auto odd = static_cast<int64_t>(reinterpret_cast<uintptr_t>(address(span)) % kAlignment);
      apart.push_back(span);
      apart.back().place = bytes_ + (odd - bytes_ % kAlignment + kAlignment) % kAlignment;
    }
    Span& last = apart.back();
    const int64_t into = address(span) - address(last);
    last.size = std::max(last.size, into + span.size);
    bytes_ = last.place + last.size;
    forms_[span.form].place = last.place + into;
  }
  spans_ = std::move(apart);
}

bool StateBytes::Form::holds() const {
  return tensor->storage().unsafeGetStorageImpl() == storage.unsafeGetStorageImpl() && storage.nbytes() == allocated &&
         tensor->sizes() == sizes && tensor->strides() == strides && tensor->storage_offset() == offset;
}

void StateBytes::clear() {
  forms_.clear();
  spans_.clear();
  held_.clear();
}

void StateBytes::keep() {
  copy_ = at::empty({bytes_}, at::kByte);
  auto* to = static_cast<char*>(copy_.mutable_data_ptr());
  for (const Span& span : spans_) std::memcpy(to + span.place, address(span), span.size);
}

void StateBytes::put() const {
  for (const Form& form : forms_) {
    if (form.holds()) continue;
    c10::StorageImpl* storage = form.storage.unsafeGetStorageImpl();
    if (storage->nbytes() != form.allocated) at::native::resize_bytes_cpu(storage, form.allocated);
    c10::TensorImpl* tensor = form.tensor->unsafeGetTensorImpl();
    tensor->set_storage_keep_dtype(form.storage);
    tensor->set_sizes_and_strides(form.sizes, form.strides, form.offset);
  }
  const auto* from = static_cast<const char*>(copy_.const_data_ptr());
  for (const Span& span : spans_) {  // a batch may lie in memory that cannot be written
    if (std::memcmp(address(span), from + span.place, span.size) == 0) continue;
    auto* to = static_cast<char*>(forms_[span.form].storage.mutable_data()) + span.begin;
    std::memcpy(to, from + span.place, span.size);
  }
}

bool StateBytes::is_as() const {
  const auto* then = static_cast<const char*>(copy_.const_data_ptr());
  return std::all_of(forms_.begin(), forms_.end(), [](const Form& form) { return form.holds(); }) &&
         std::all_of(spans_.begin(), spans_.end(),
                     [&](const Span& span) { return std::memcmp(address(span), then + span.place, span.size) == 0; });
}

at::Tensor StateBytes::kept(const at::Tensor& tensor) const {
  auto form = std::find_if(forms_.begin(), forms_.end(), [&](const Form& one) { return one.tensor->is_same(tensor); });
  TORCH_CHECK(form != forms_.end(), "the tensor is none of those that were kept");
  return at::empty({0}, tensor.options().requires_grad(false))
      .set_(copy_.storage(), form->place / static_cast<int64_t>(tensor.element_size()), form->sizes, form->strides);
}

uint64_t StateBytes::checksum() const {
  constexpr uint64_t kOdd = 0x9e3779b97f4a7c15;  // a product with an odd number loses nothing
  constexpr size_t kLanes = 4;                   // products that do not wait for one another
  std::array<uint64_t, kLanes> sums{1, 2, 3, 4};
  auto mix = [](uint64_t sum, uint64_t word) {
    sum = (sum ^ word) * kOdd;
    return sum ^ (sum >> 32);
  };
  for (const Span& span : spans_) {
    const char* from = address(span);
    const char* end = from + span.size;
    for (; end - from >= static_cast<int64_t>(sizeof sums); from += sizeof sums) {
      std::array<uint64_t, kLanes> words;
      std::memcpy(words.data(), from, sizeof words);
      for (size_t i = 0; i < kLanes; ++i) sums[i] = mix(sums[i], words[i]);
    }
    for (; from != end; ++from) sums[0] = mix(sums[0], static_cast<unsigned char>(*from));
  }
  return mix(mix(mix(sums[0], sums[1]), sums[2]), sums[3]);
}

}  // namespace waterflow
