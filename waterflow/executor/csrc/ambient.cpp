#include "ambient.h"

#include <ATen/Context.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/autocast_mode.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/Device.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/anomaly_mode.h>

#include "denormals.h"

namespace waterflow {

std::vector<std::pair<const char*, int>> ambient_parts(const std::string& device_type) {
  const auto kind = c10::Device(device_type).type();
  const auto& context = at::globalContext();
  std::vector<std::pair<const char*, int>> parts;
  parts.reserve(48);
  const auto add = [&](const char* name, auto value) { parts.emplace_back(name, static_cast<int>(value)); };
  const auto add_autocast = [&](const char* name, const char* name_of_type, at::DeviceType device) {
    add(name, at::autocast::is_autocast_enabled(device));
    add(name_of_type, at::autocast::get_autocast_dtype(device));
  };
  add_autocast("autocast", "type of autocast", at::kCPU);
  add_autocast("autocast on GPUs", "type of autocast on GPUs", at::kCUDA);
  if (kind != at::kCPU && kind != at::kCUDA) add_autocast("autocast there", "type of autocast there", kind);
  add("cache of autocast", at::autocast::is_autocast_cache_enabled());
  add("inference mode", c10::InferenceMode::is_enabled());
  add("detection of anomalies", torch::autograd::AnomalyMode::is_enabled());
  add("check for NaN", torch::autograd::AnomalyMode::should_check_nan());
  add("hooks for saved tensors", at::SavedTensorDefaultHooks::is_enabled());
  add("function modes", at::impl::PythonTorchFunctionTLS::get_disabled_state());
  add("default type", c10::get_default_dtype_as_scalartype());
  add("denormal numbers", denormals_here());
  add("deterministic algorithms", context.deterministicAlgorithms());
  add("deterministic algorithms, warnings", context.deterministicAlgorithmsWarnOnly());
  add("deterministic memory", context.deterministicFillUninitializedMemory());
  add("flash attention", context.userEnabledFlashSDP());
  add("efficient attention", context.userEnabledMemEfficientSDP());
  add("plain attention", context.userEnabledMathSDP());
  add("cuDNN attention", context.userEnabledCuDNNSDP());
  add("oneDNN", context.userEnabledMkldnn());
  add("NNPACK", context.userEnabledNNPACK());
  add("cuDNN", context.userEnabledCuDNN());
  add("cuDNN benchmarks", context.benchmarkCuDNN());
  add("deterministic cuDNN", context.deterministicCuDNN());
  add("deterministic oneDNN", context.deterministicMkldnn());
  using Backend = at::Float32Backend;
  using Op = at::Float32Op;
  add("precision", context.float32Precision(Backend::GENERIC, Op::ALL));
  add("precision on GPUs", context.float32Precision(Backend::CUDA, Op::ALL));
  add("precision of convolutions on GPUs", context.float32Precision(Backend::CUDA, Op::CONV));
  add("precision of recurrent layers on GPUs", context.float32Precision(Backend::CUDA, Op::RNN));
  add("precision of products on GPUs", context.float32Precision(Backend::CUDA, Op::MATMUL));
  add("precision of oneDNN", context.float32Precision(Backend::MKLDNN, Op::ALL));
  add("precision of oneDNN's convolutions", context.float32Precision(Backend::MKLDNN, Op::CONV));
  add("precision of oneDNN's recurrent layers", context.float32Precision(Backend::MKLDNN, Op::RNN));
  add("precision of oneDNN's products", context.float32Precision(Backend::MKLDNN, Op::MATMUL));
  return parts;
}

std::string ambient(const std::string& device_type) {
  std::string key;
  for (const auto& [name, value] : ambient_parts(device_type)) {
    key.push_back(static_cast<char>(value));
    key.push_back(static_cast<char>(value >> 8));
  }
  return key;
}

int modes_here() {
  const bool saving = at::SavedTensorDefaultHooks::get_hooks().has_value();
  return static_cast<int>(at::impl::PythonTorchFunctionTLS::stack_len() +
                          c10::impl::TorchDispatchModeTLS::stack_len()) +
         (saving ? 1 : 0);
}

}  // namespace waterflow
