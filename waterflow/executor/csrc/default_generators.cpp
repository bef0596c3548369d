// Operators on the default generator of a device, as a step asks for its state and sets it.
#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <torch/library.h>

#include <mutex>
#include <optional>

namespace waterflow {
namespace {

// A job's own generator stands in for the default one of its own device, and for no other.
at::Generator drawn_from(at::Device device, const std::optional<at::Generator>& own) {
  if (own && own->defined() && own->device().type() == device.type()) return *own;
  return at::globalContext().defaultGenerator(device);
}

at::Tensor random_state(at::Device device, std::optional<at::Generator> own) {
  auto generator = drawn_from(device, own);
  std::lock_guard<std::mutex> guard(generator.mutex());
  return generator.get_state();
}

void set_random_state(const at::Tensor& state, at::Device device, std::optional<at::Generator> own) {
  auto generator = drawn_from(device, own);
  std::lock_guard<std::mutex> guard(generator.mutex());
  generator.set_state(state);
}

void seed_random(int64_t seed, at::Device device, std::optional<at::Generator> own) {
  auto generator = drawn_from(device, own);
  std::lock_guard<std::mutex> guard(generator.mutex());
  generator.set_current_seed(static_cast<uint64_t>(seed));
}

}  // namespace
}  // namespace waterflow

TORCH_LIBRARY_FRAGMENT(waterflow, m) {
  const std::vector<at::Tag> random = {at::Tag::nondeterministic_seeded};
  m.def("random_state(Device device, *, Generator? generator=None) -> Tensor", random);
  m.def("set_random_state(Tensor state, Device device, *, Generator? generator=None) -> ()", random);
  m.def("seed_random(int seed, Device device, *, Generator? generator=None) -> ()", random);
}
TORCH_LIBRARY_IMPL(waterflow, CompositeExplicitAutograd, m) {
  m.impl("random_state", &waterflow::random_state);
  m.impl("set_random_state", &waterflow::set_random_state);
  m.impl("seed_random", &waterflow::seed_random);
}
