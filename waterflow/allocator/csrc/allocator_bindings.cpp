// What Python sees of devices and of the multi-stream allocator.
#include <torch/extension.h>

#include "simulated_device.h"

namespace py = pybind11;

namespace waterflow {

void bind_devices(py::module_& m) {
  using unlocked = py::call_guard<py::gil_scoped_release>;
  py::register_exception<Race>(m, "Race", PyExc_RuntimeError);

  py::class_<Stretch>(m, "Stretch")
      .def(py::init([](StreamId stream, int64_t tick) { return Stretch{stream, tick}; }), py::arg("stream"),
           py::arg("tick"))
      .def_readonly("stream", &Stretch::stream)
      .def_readonly("tick", &Stretch::tick);

  py::class_<Device, std::shared_ptr<Device>>(m, "Device")
      .def_property_readonly("granularity", &Device::granularity)
      .def("reserve", &Device::reserve, py::arg("bytes"), unlocked())
      .def("unreserve", &Device::unreserve, py::arg("base"), py::arg("bytes"), unlocked())
      .def("grow", &Device::grow, py::arg("at"), py::arg("bytes"), unlocked())
      .def("shrink", &Device::shrink, py::arg("at"), py::arg("bytes"), unlocked())
      .def("add_stream", &Device::add_stream, unlocked())
      .def("remove_stream", &Device::remove_stream, py::arg("stream"), unlocked())
      .def("record", &Device::record, py::arg("stream"), unlocked())
      .def("wait", &Device::wait, py::arg("stream"), py::arg("event"), unlocked())
      .def("complete", &Device::complete, py::arg("event"), unlocked())
      .def("synchronize", &Device::synchronize, py::arg("event"), unlocked())
      .def("forget", &Device::forget, py::arg("event"), unlocked());

  py::class_<SimulatedDevice, Device, std::shared_ptr<SimulatedDevice>>(m, "SimulatedDevice")
      .def(py::init<int64_t, int64_t>(), py::arg("capacity"), py::arg("granularity") = int64_t{2} << 20)
      .def("access", &SimulatedDevice::access, py::arg("stream"), py::arg("at"), py::arg("bytes"),
           py::arg("write") = true)
      .def("advance", &SimulatedDevice::advance, py::arg("event"))
      .def("advance_stream", &SimulatedDevice::advance_stream, py::arg("stream"))
      .def("finish_all", &SimulatedDevice::finish_all)
      .def("ordered", &SimulatedDevice::ordered, py::arg("before"), py::arg("stream"))
      .def("now", &SimulatedDevice::now, py::arg("stream"))
      .def_property_readonly("capacity", &SimulatedDevice::capacity)
      .def_property_readonly("grown", &SimulatedDevice::grown)
      .def_property_readonly("accesses", &SimulatedDevice::accesses)
      .def_property_readonly("waits", &SimulatedDevice::waits)
      .def("check", &SimulatedDevice::check);
}

void bind_cuda(py::module_& m);

void bind_allocator(py::module_& m) {
  bind_devices(m);
  bind_cuda(m);
}

}  // namespace waterflow
