// What Python sees of GPUs: for tests, and for what is set up before training.
#include <torch/extension.h>

#include "cuda_arena.h"
#include "cuda_device.h"
#include "planned_ranges.h"

namespace py = pybind11;

namespace waterflow {

void bind_cuda(py::module_& m) {
  using unlocked = py::call_guard<py::gil_scoped_release>;
  py::register_exception<CudaError>(m, "CudaError", PyExc_RuntimeError);

  py::class_<CudaDevice, Device, std::shared_ptr<CudaDevice>>(m, "CudaDevice")
      .def(py::init([](int index, int64_t capacity, const std::string& library) {
             return std::make_shared<CudaDevice>(CudaDriver::load(library), index, capacity);
           }),
           py::arg("index") = 0, py::arg("capacity") = 0, py::arg("library") = "", unlocked())
      .def(
          "adopt_stream",
          [](CudaDevice& device, uintptr_t handle) {
            return device.adopt_stream(reinterpret_cast<cu::Stream>(handle));
          },
          py::arg("handle"), unlocked())
      .def("synchronize_all", &CudaDevice::synchronize_all, unlocked())
      .def("allocate_pinned", &CudaDevice::allocate_pinned, py::arg("bytes"), unlocked())
      .def("free_pinned", &CudaDevice::free_pinned, py::arg("at"), unlocked())
      .def_property_readonly("index", &CudaDevice::index)
      .def_property_readonly("capacity", &CudaDevice::capacity)
      .def_property_readonly("grown", &CudaDevice::grown)
      .def_property_readonly("pinned", &CudaDevice::pinned)
      .def_property_readonly("free_memory", &CudaDevice::free_memory)
      .def_property_readonly("library", [](const CudaDevice& device) { return device.driver().library(); });

  py::class_<CudaArena>(m, "CudaArena")
      .def(py::init<std::shared_ptr<CudaDevice>, int64_t, int64_t>(), py::arg("device"), py::arg("most"),
           py::arg("page") = 0)
      .def("resize", &CudaArena::resize, py::arg("bytes"))
      .def("back", &CudaArena::back, py::arg("end"), py::arg("bytes"))
      .def("discard", &CudaArena::discard, py::arg("end"), py::arg("start"), py::arg("stop"))
      .def("strand", &CudaArena::strand, py::arg("end"))
      .def("begin", [](CudaArena& arena, int end, std::shared_ptr<RequestPlan> plan) { arena.placer(end).begin(plan); })
      .def("request",
           [](CudaArena& arena, int end, int instruction, size_t bytes) {
             arena.placer(end).instruction(instruction);
             return reinterpret_cast<uintptr_t>(arena.placer(end).request(bytes));
           })
      .def("finish", [](CudaArena& arena, int end) { return arena.placer(end).finish(); })
      .def("base", [](CudaArena& arena, int end) { return reinterpret_cast<uintptr_t>(arena.placer(end).base()); })
      .def("check", &CudaArena::check)
      .def_property_readonly("most", &CudaArena::most)
      .def_property_readonly("size", &CudaArena::size)
      .def_property_readonly("unit", &CudaArena::unit)
      .def_property_readonly("pages", &CudaArena::pages);
  m.def("release_planned", [](uintptr_t at) { return release_planned(reinterpret_cast<void*>(at)); });
}

}  // namespace waterflow
