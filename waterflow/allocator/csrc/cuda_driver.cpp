#include "cuda_driver.h"

#include <dlfcn.h>

#include <cstdlib>
#include <map>
#include <mutex>

namespace waterflow {
namespace {

constexpr const char* DEFAULT_LIBRARY = "libcuda.so.1";

const char* remedy(cu::Result code) {
  if (code == cu::OUT_OF_MEMORY) {
    return "Lower memory= (see what else is on the device with nvidia-smi), or lower the batch size.";
  }
  if (code == cu::DEINITIALIZED) return "The process is ending: close engines before that.";
  if (code == cu::NO_DEVICE) return "No GPU is visible: see nvidia-smi and CUDA_VISIBLE_DEVICES, or use device='cpu'.";
  if (code == 1 || code == 400) return "This is a mistake in waterflow; please report it with this message.";
  if (code == 803 || code == 35) return "The driver is older than CUDA in this torch: update it.";
  if ((code >= 700 && code < 720) || code == 214 || code == 999) {
    return "The device's context is lost: end this process and go on from a checkpoint. The error may come from any "
           "earlier kernel; CUDA_LAUNCH_BLOCKING=1 finds it.";
  }
  if (code >= 900 && code < 910) return "This cannot be done while a CUDA graph is captured: do it before.";
  return "See the CUDA driver's documentation of this error.";
}

}  // namespace

CudaDriver::CudaDriver(const std::string& library) : library_(library) {
  void* const opened = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (opened == nullptr) {
    throw CudaError(
        "cannot load the CUDA driver " + library + ": " + dlerror() + ". Install NVIDIA's driver, or use device='cpu'.",
        cu::NO_DEVICE);
  }
#define X(member, name, parameters)                                                                            \
  member = reinterpret_cast<cu::Result(*) parameters>(dlsym(opened, name));                                    \
  if (member == nullptr) {                                                                                     \
    throw CudaError("the CUDA driver " + library + " has no " name ". It is older than CUDA 11.4: update it.", \
                    cu::NO_DEVICE);                                                                            \
  }
  WATERFLOW_CUDA_FUNCTIONS(X)
#undef X
  stream_id = reinterpret_cast<decltype(stream_id)>(dlsym(opened, "cuStreamGetId"));
  if (const auto result = init(0)) fail(result, "cuInit()");
}

const CudaDriver& CudaDriver::load(const std::string& library) {
  static std::mutex lock;
  static auto* loaded = new std::map<std::string, const CudaDriver*>;
  const char* const named = std::getenv("WATERFLOW_CUDA_LIBRARY");
  const std::string name = !library.empty() ? library : named != nullptr && *named ? named : DEFAULT_LIBRARY;
  std::lock_guard<std::mutex> guard(lock);
  const CudaDriver*& driver = (*loaded)[name];
  if (driver == nullptr) driver = new CudaDriver(name);
  return *driver;
}

void CudaDriver::fail(cu::Result result, const std::string& call) const {
  const char *text = nullptr, *name = nullptr;
  error_string(result, &text);
  error_name(result, &name);
  throw CudaError(call + " failed: " + (text ? text : "an error that the driver does not know") + " (" +
                      (name ? name : "unknown") + ", " + std::to_string(result) + "). " + remedy(result),
                  result);
}

}  // namespace waterflow
