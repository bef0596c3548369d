#include "direct_call.h"

#include <stdexcept>
#include <unordered_map>

namespace waterflow {
namespace {

std::unordered_map<std::string, DirectCall>& calls() {
  static std::unordered_map<std::string, DirectCall> made;
  return made;
}

#ifdef WATERFLOW_TEST_HOOKS
std::string wrong;  // the kernel's name
DirectCall right_call = nullptr;

at::Tensor wrong_call(const c10::IValue* const* arguments) {
  auto result = right_call(arguments);
  if (result.numel() > 0) *static_cast<unsigned char*>(result.data_ptr()) ^= 1;
  return result;
}
#endif

}  // namespace

#ifdef WATERFLOW_TEST_HOOKS
void plant_wrong_bit(const std::string& name) {
  const auto found = calls().find(name);
  if (!name.empty() && found == calls().end()) throw std::invalid_argument("no kernel is called '" + name + "'");
  if (!name.empty()) right_call = found->second;
  wrong = name;
}
#endif

DirectCall find_direct_call(const std::string& name) {
#ifdef WATERFLOW_TEST_HOOKS
  if (!wrong.empty() && name == wrong) return &wrong_call;
#endif
  const auto found = calls().find(name);
  return found == calls().end() ? nullptr : found->second;
}

RegisterDirectCall::RegisterDirectCall(std::string name, DirectCall call) { calls().emplace(std::move(name), call); }

}  // namespace waterflow
