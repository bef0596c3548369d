// What Python sees of the order on the device, and of simulated runs.
#include <torch/extension.h>

#include "device_clock.h"
#include "simulation.h"

namespace py = pybind11;

namespace waterflow {

void bind_simulation(py::module_& m) {
  py::enum_<OrderFault>(m, "OrderFault")
      .value("none", OrderFault::none)
      .value("heights_at_events", OrderFault::heights_at_events)
      .value("dropped_waits", OrderFault::dropped_waits);
  py::class_<DeviceOrder>(m, "DeviceOrder")
      .def(py::init<OrderFault>(), py::arg("fault") = OrderFault::none)
      .def("before", &DeviceOrder::before, py::arg("end"), py::arg("peak"), py::arg("size"))
      .def("after", &DeviceOrder::after, py::arg("end"), py::arg("peak"), py::arg("event"), py::arg("held_after") = 0)
      .def("reached", &DeviceOrder::reached, py::arg("end"), py::arg("event"))
      .def("kept", &DeviceOrder::kept)
      .def("check", &DeviceOrder::check)
      .def_readonly_static("most", &DeviceOrder::kMost);

  py::class_<DeviceClock>(m, "DeviceClock", "Lanes that share a device's rates; see csrc/device_clock.h.")
      .def(py::init<int32_t>(), py::arg("lanes"))
      .def(
          "add",
          [](DeviceClock& clock, int32_t lane, int64_t nanoseconds, int64_t memory, int64_t compute,
             const std::vector<ItemId>& after) { return clock.add(lane, {nanoseconds, memory, compute}, after); },
          py::arg("lane"), py::arg("nanoseconds"), py::arg("memory") = 0, py::arg("compute") = 0,
          py::arg("after") = std::vector<ItemId>{})
      .def("next",
           [](DeviceClock& clock) -> std::optional<std::tuple<ItemId, int32_t, int64_t>> {
             const auto done = clock.next();
             if (!done) return std::nullopt;
             return std::tuple(done->item, done->lane, done->at);
           })
      .def_property_readonly("now", &DeviceClock::now)
      .def("start_of", &DeviceClock::start_of, py::arg("item"))
      .def("end_of", &DeviceClock::end_of, py::arg("item"))
      .def("check", &DeviceClock::check)
      .def_readonly_static("whole", &Work::kWhole);

  py::class_<SimulatedStep, std::shared_ptr<SimulatedStep>>(m, "SimulatedStep")
      .def(py::init([](std::vector<int64_t> peak, std::vector<int64_t> after,
                       const std::vector<std::vector<std::tuple<int64_t, int64_t, int64_t>>>& work,
                       std::vector<int64_t> first, const std::vector<std::tuple<int64_t, int64_t, bool>>& touches,
                       int64_t copy_ns) {
             std::vector<Touch> made;
             made.reserve(touches.size());
             for (const auto& [offset, bytes, write] : touches) made.push_back({offset, bytes, write});
             std::vector<std::vector<Work>> times(work.size());
             for (size_t g = 0; g < work.size(); ++g) {
               for (const auto& [nanoseconds, memory, compute] : work[g]) {
                 times[g].push_back({nanoseconds, memory, compute});
               }
             }
             return std::make_shared<SimulatedStep>(Heights(std::move(peak), std::move(after)), std::move(times),
                                                    std::move(first), std::move(made), copy_ns);
           }),
           py::arg("peak"), py::arg("after"), py::arg("work"), py::arg("first"), py::arg("touches"),
           py::arg("copy_ns") = 0);

  py::class_<SimulatedSpan>(m, "SimulatedSpan")
      .def_readonly("job", &SimulatedSpan::job)
      .def_readonly("step", &SimulatedSpan::step)
      .def_readonly("group", &SimulatedSpan::group)
      .def_readonly("lane", &SimulatedSpan::lane)
      .def_readonly("issued", &SimulatedSpan::issued)
      .def_readonly("start", &SimulatedSpan::start)
      .def_readonly("end", &SimulatedSpan::end)
      .def_readonly("peak", &SimulatedSpan::peak)
      .def_readonly("after", &SimulatedSpan::after);

  py::class_<SimulationResult>(m, "SimulationResult")
      .def_readonly("makespan", &SimulationResult::makespan)
      .def_readonly("alone", &SimulationResult::alone)
      .def_readonly("busy", &SimulationResult::busy)
      .def_readonly("overlapped", &SimulationResult::overlapped)
      .def_readonly("peak", &SimulationResult::peak)
      .def_readonly("peaks", &SimulationResult::peaks)
      .def_readonly("waits", &SimulationResult::waits)
      .def_readonly("steps", &SimulationResult::steps)
      .def_readonly("races", &SimulationResult::races)
      .def_readonly("told", &SimulationResult::told)
      .def_readonly("spans", &SimulationResult::spans);

  m.def(
      "simulate",
      [](const std::vector<std::pair<std::shared_ptr<SimulatedStep>, int32_t>>& jobs, int64_t arena, int32_t arenas,
         int32_t run_ahead, uint64_t seed, int32_t stalled, int64_t stall_ns, bool host_learns, OrderFault fault,
         bool early_issue) {
        py::gil_scoped_release release;
        Simulation simulation({arena, arenas, run_ahead, seed, stalled, stall_ns, host_learns, fault, early_issue});
        for (const auto& [step, steps] : jobs) simulation.add_job(step, steps);
        return simulation.run();
      },
      py::arg("jobs"), py::arg("arena"), py::arg("arenas") = 1, py::arg("run_ahead") = 2, py::arg("seed") = 0,
      py::arg("stalled") = 0, py::arg("stall_ns") = 0, py::arg("host_learns") = false,
      py::arg("fault") = OrderFault::none, py::arg("early_issue") = false,
      "Jobs (step, number of steps) on the lanes of arenas of so many bytes; see csrc/simulation.h.");
}

}  // namespace waterflow
