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

std::string ambient(const std::string& device_type) {
  const auto kind = c10::Device(device_type).type();
  const auto& context = at::globalContext();
  std::string key;
  key.reserve(96);
  const auto add = [&](auto value) {
    key.push_back(static_cast<char>(static_cast<int>(value)));
    key.push_back(static_cast<char>(static_cast<int>(value) >> 8));
  };
  const auto add_autocast = [&](at::DeviceType device) {
    add(at::autocast::is_autocast_enabled(device));
    add(at::autocast::get_autocast_dtype(device));
  };
  add_autocast(at::kCPU);
  add_autocast(at::kCUDA);
  if (kind != at::kCPU && kind != at::kCUDA) add_autocast(kind);
  add(at::autocast::is_autocast_cache_enabled());
  add(c10::InferenceMode::is_enabled());
  add(torch::autograd::AnomalyMode::is_enabled());
  add(torch::autograd::AnomalyMode::should_check_nan());
  add(at::SavedTensorDefaultHooks::is_enabled());
  add(at::impl::PythonTorchFunctionTLS::get_disabled_state());
  add(c10::get_default_dtype_as_scalartype());
  add(denormals_here());
  add(context.deterministicAlgorithms());
  add(context.deterministicAlgorithmsWarnOnly());
  add(context.deterministicFillUninitializedMemory());
  add(context.userEnabledFlashSDP());
  add(context.userEnabledMemEfficientSDP());
  add(context.userEnabledMathSDP());
  add(context.userEnabledCuDNNSDP());
  add(context.userEnabledMkldnn());
  add(context.userEnabledNNPACK());
  add(context.userEnabledCuDNN());
  add(context.benchmarkCuDNN());
  add(context.deterministicCuDNN());
  add(context.deterministicMkldnn());
  using Backend = at::Float32Backend;
  using Op = at::Float32Op;
  add(context.float32Precision(Backend::GENERIC, Op::ALL));
  add(context.float32Precision(Backend::CUDA, Op::ALL));
  add(context.float32Precision(Backend::CUDA, Op::CONV));
  add(context.float32Precision(Backend::CUDA, Op::RNN));
  add(context.float32Precision(Backend::CUDA, Op::MATMUL));
  add(context.float32Precision(Backend::MKLDNN, Op::ALL));
  add(context.float32Precision(Backend::MKLDNN, Op::CONV));
  add(context.float32Precision(Backend::MKLDNN, Op::RNN));
  add(context.float32Precision(Backend::MKLDNN, Op::MATMUL));
  return key;
}

int modes_here() {
  const bool saving = at::SavedTensorDefaultHooks::get_hooks().has_value();
  return static_cast<int>(at::impl::PythonTorchFunctionTLS::stack_len() +
                          c10::impl::TorchDispatchModeTLS::stack_len()) +
         (saving ? 1 : 0);
}

}  // namespace waterflow
