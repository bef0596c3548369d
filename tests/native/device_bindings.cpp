// What Python sees of devices.
#include <pybind11/pybind11.h>

#include "waterflow/allocator/csrc/cpu/cpu_device.h"
#include "waterflow/allocator/csrc/simulated/simulated_device.h"

namespace py = pybind11;

namespace waterflow {
namespace {

// A device written in Python: the oracles of tests are. `get_granularity` is a method there.
class PythonDevice : public Device {
 public:
  int64_t granularity() const override { PYBIND11_OVERRIDE_PURE_NAME(int64_t, Device, "get_granularity", granularity); }
  uintptr_t reserve(int64_t bytes) override { PYBIND11_OVERRIDE_PURE(uintptr_t, Device, reserve, bytes); }
  void unreserve(uintptr_t base, int64_t bytes) override {
    PYBIND11_OVERRIDE_PURE(void, Device, unreserve, base, bytes);
  }
  bool grow(uintptr_t at, int64_t bytes) override { PYBIND11_OVERRIDE_PURE(bool, Device, grow, at, bytes); }
  void shrink(uintptr_t at, int64_t bytes) override { PYBIND11_OVERRIDE_PURE(void, Device, shrink, at, bytes); }
  StreamId add_stream() override { PYBIND11_OVERRIDE_PURE(StreamId, Device, add_stream); }
  void remove_stream(StreamId stream) override { PYBIND11_OVERRIDE_PURE(void, Device, remove_stream, stream); }
  EventId record(StreamId stream) override { PYBIND11_OVERRIDE_PURE(EventId, Device, record, stream); }
  void wait(StreamId stream, EventId event) override { PYBIND11_OVERRIDE_PURE(void, Device, wait, stream, event); }
  bool complete(EventId event) override { PYBIND11_OVERRIDE_PURE(bool, Device, complete, event); }
  void synchronize(EventId event) override { PYBIND11_OVERRIDE_PURE(void, Device, synchronize, event); }
  void forget(EventId event) override { PYBIND11_OVERRIDE_PURE(void, Device, forget, event); }
};

}  // namespace

void bind_devices(py::module_& m) {
  using unlocked = py::call_guard<py::gil_scoped_release>;
  py::register_exception<Race>(m, "Race", PyExc_RuntimeError);

  py::class_<Device, PythonDevice, std::shared_ptr<Device>>(m, "Device")
      .def(py::init<>())
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
      .def_property_readonly("capacity", &SimulatedDevice::capacity)
      .def_property_readonly("grown", &SimulatedDevice::grown)
      .def_property_readonly("accesses", &SimulatedDevice::accesses)
      .def_property_readonly("waits", &SimulatedDevice::waits)
      .def("check", &SimulatedDevice::check);

  py::class_<CpuDevice, Device, std::shared_ptr<CpuDevice>>(m, "CpuDevice")
      .def(py::init([](int64_t capacity, uint64_t seed, double stall_share, int64_t stall_us) {
             // Threads of it may want the interpreter lock to finish.
             return std::shared_ptr<CpuDevice>(new CpuDevice(capacity, Stalls{seed, stall_share, stall_us}),
                                               [](CpuDevice* device) {
                                                 if (!PyGILState_Check()) return delete device;
                                                 py::gil_scoped_release release;
                                                 delete device;
                                               });
           }),
           py::arg("capacity"), py::arg("seed") = 0, py::arg("stall_share") = 0.0, py::arg("stall_us") = 0)
      .def("stall", &CpuDevice::stall, py::arg("stream"), py::arg("microseconds"), unlocked())
      .def("finish", &CpuDevice::finish, py::arg("stream"), unlocked())
      .def("finish_all", &CpuDevice::finish_all, unlocked())
      .def(
          "fill",
          [](CpuDevice& self, StreamId stream, uintptr_t at, int64_t bytes, int value) {
            self.enqueue(stream, [=] { std::memset(reinterpret_cast<void*>(at), value, static_cast<size_t>(bytes)); });
          },
          py::arg("stream"), py::arg("at"), py::arg("bytes"), py::arg("value"), unlocked())
      .def(
          "count_other",
          [](CpuDevice& self, StreamId stream, uintptr_t at, int64_t bytes, int value, const py::function& told) {
            auto held = std::shared_ptr<py::function>(new py::function(told), [](py::function* function) {
              py::gil_scoped_acquire acquire;
              delete function;
            });
            py::gil_scoped_release release;
            self.enqueue(stream, [=] {
              const auto* begin = reinterpret_cast<const uint8_t*>(at);
              int64_t other = 0;
              for (int64_t i = 0; i < bytes; ++i) other += begin[i] != static_cast<uint8_t>(value);
              py::gil_scoped_acquire acquire;
              (*held)(other);
            });
          },
          py::arg("stream"), py::arg("at"), py::arg("bytes"), py::arg("value"), py::arg("told"))
      .def_property_readonly("capacity", &CpuDevice::capacity)
      .def_property_readonly("grown", &CpuDevice::grown);
}

}  // namespace waterflow
