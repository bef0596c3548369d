// A step's memory on its way to host memory and back: the same bytes, sizes and strides.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <utility>

namespace waterflow {
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
