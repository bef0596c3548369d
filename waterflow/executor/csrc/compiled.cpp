#include "compiled.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <thread>

namespace waterflow {
namespace {

struct Loaded {
  std::shared_mutex lock;
  std::map<int64_t, CompiledRegion*> by_number;
  int64_t next = 0;
};

Loaded& loaded() {
  static auto* made = new Loaded();  // never destroyed: lanes may run while the process ends
  return *made;
}

std::vector<at::Tensor> compiled(int64_t region, at::TensorList inputs) {
  CompiledRegion* found = nullptr;
  {
    std::shared_lock held(loaded().lock);
    const auto entry = loaded().by_number.find(region);
    TORCH_CHECK(entry != loaded().by_number.end(), "no compiled region ", region, " is loaded");
    found = entry->second;  // whoever calls keeps it
  }
  return found->run(inputs.vec());
}

}  // namespace

CompiledRegion::CompiledRegion(const std::string& path)
    : runner_(path, std::max(2u, std::thread::hardware_concurrency())) {
  std::unique_lock held(loaded().lock);
  number_ = loaded().next++;
  loaded().by_number[number_] = this;
}

CompiledRegion::~CompiledRegion() {
  std::unique_lock held(loaded().lock);
  loaded().by_number.erase(number_);
}

}  // namespace waterflow

TORCH_LIBRARY_FRAGMENT(waterflow, m) { m.def("compiled(int region, Tensor[] inputs) -> Tensor[]"); }
TORCH_LIBRARY_IMPL(waterflow, CPU, m) { m.impl("compiled", &waterflow::compiled); }
