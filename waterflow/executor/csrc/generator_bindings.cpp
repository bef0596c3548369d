// Python's view of a thread's own random generators.
#include <torch/csrc/Generator.h>
#include <torch/extension.h>

#include <optional>
#include <string>
#include <vector>

#include "thread_generators.h"

namespace waterflow {

void bind_generators(py::module_& m) {
  py::class_<ThreadGenerators>(m, "ThreadGenerators")
      .def(py::init<std::vector<at::Generator>>())
      .def("__enter__", &ThreadGenerators::enter)
      .def("__exit__", [](ThreadGenerators& self, const py::args&) { self.exit(); });

  // The calling thread's generator for a kind of device, "cpu" or "cuda:0"; None where it draws from the process's.
  m.def("thread_generator", [](const std::string& device) -> std::optional<at::Generator> {
    const auto* own = ThreadGenerators::of(c10::Device(device));
    return own != nullptr ? std::optional(*own) : std::nullopt;
  });

  // Makes a Python object of a subclass of torch.Generator another name for a generator.
  m.def("alias_generator", [](const py::object& name, const at::Generator& generator) {
    TORCH_CHECK_TYPE(THPGenerator_Check(name.ptr()), "only a torch.Generator can be another name for a generator");
    reinterpret_cast<THPGenerator*>(name.ptr())->cdata = generator;
  });
}

}  // namespace waterflow
