#include "direct_call.h"

#include <unordered_map>

namespace waterflow {
namespace {

std::unordered_map<std::string, DirectCall>& calls() {
  static std::unordered_map<std::string, DirectCall> made;
  return made;
}

}  // namespace

DirectCall find_direct_call(const std::string& name) {
  const auto found = calls().find(name);
  return found == calls().end() ? nullptr : found->second;
}

RegisterDirectCall::RegisterDirectCall(std::string name, DirectCall call) { calls().emplace(std::move(name), call); }

}  // namespace waterflow
