// Admission, barriers, the order on the device, and its clock, as Python sees them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <memory>

#include "waterflow/executor/csrc/engine/admission.h"
#include "waterflow/executor/csrc/engine/cross_lane_fences.h"
#include "waterflow/executor/csrc/engine/page_ledger.h"
#include "waterflow/executor/csrc/engine/simulation.h"

namespace py = pybind11;

namespace waterflow {
namespace {

// Admission with heights that live as long as it does, for tests of the policy alone.
class OwnedAdmission : public Admission {
 public:
  using Admission::Admission;
  bool issue(Id job, std::vector<int64_t> peak, std::vector<int64_t> after, bool opportunistic) {
    auto heights = std::make_unique<Heights>(std::move(peak), std::move(after));
    auto& owned = heights_[job];
    if (!in_step(job)) owned = std::move(heights);
    return try_issue(job, owned.get(), opportunistic);
  }

 private:
  std::map<Id, std::unique_ptr<Heights>> heights_;
};

}  // namespace

void bind_admission(py::module_& m) {
  py::class_<CounterBarrier>(m, "CounterBarrier", py::module_local())
      .def(py::init<int32_t>(), py::arg("parties"))
      .def("arrive", &CounterBarrier::arrive)
      .def("pass_", &CounterBarrier::pass)
      .def("rearm", &CounterBarrier::rearm)
      .def_property_readonly("open", &CounterBarrier::open)
      .def_property_readonly("waiting_for", &CounterBarrier::waiting_for);

  py::class_<OwnedAdmission>(m, "Admission", py::module_local())
      .def(py::init<int64_t, int32_t>(), py::arg("capacity"), py::arg("patience") = 1)
      .def("try_issue", &OwnedAdmission::issue, py::arg("job"), py::arg("peak"), py::arg("after"),
           py::arg("opportunistic") = false)
      .def("complete", &OwnedAdmission::complete)
      .def("release", &OwnedAdmission::release)
      .def("wait", &OwnedAdmission::wait, py::arg("job"), py::arg("opportunistic") = false)
      .def("waiting", &OwnedAdmission::waiting)
      .def("must_yield", &OwnedAdmission::must_yield, py::arg("job"), py::arg("opportunistic") = false)
      .def("set_capacity", &OwnedAdmission::set_capacity)
      .def("held_by", &OwnedAdmission::held_by)
      .def("groups_left", &OwnedAdmission::groups_left)
      .def("in_step", &OwnedAdmission::in_step)
      .def_property_readonly("held", &OwnedAdmission::held)
      .def_property_readonly("capacity", &OwnedAdmission::capacity)
      .def_property_readonly("pending_capacity", &OwnedAdmission::pending_capacity)
      .def("check", &OwnedAdmission::check);

  py::enum_<OrderFault>(m, "OrderFault", py::module_local())
      .value("none", OrderFault::none)
      .value("heights_at_events", OrderFault::heights_at_events)
      .value("dropped_waits", OrderFault::dropped_waits);
  py::class_<CrossLaneFences>(m, "CrossLaneFences", py::module_local())
      .def(py::init<OrderFault>(), py::arg("fault") = OrderFault::none)
      .def("before", &CrossLaneFences::before, py::arg("end"), py::arg("peak"), py::arg("size"))
      .def("after", &CrossLaneFences::after, py::arg("end"), py::arg("peak"), py::arg("event"),
           py::arg("held_after") = 0)
      .def("reached", &CrossLaneFences::reached, py::arg("end"), py::arg("event"))
      .def("kept", &CrossLaneFences::kept)
      .def("check", &CrossLaneFences::check)
      .def_readonly_static("most", &CrossLaneFences::kMost);
  py::class_<PageLedger>(m, "PageLedger", py::module_local())
      .def(py::init<int64_t, int64_t, int64_t, bool>(), py::arg("size"), py::arg("page") = 1, py::arg("apart") = 0,
           py::arg("behind") = false)
      .def_property_readonly("size", &PageLedger::size)
      .def_property_readonly("room", &PageLedger::room)
      .def("standing", &PageLedger::standing, py::arg("end"))
      .def("fit", &PageLedger::fit, py::arg("end"), py::arg("height"), py::arg("capacity"))
      .def("resize", &PageLedger::resize, py::arg("size"))
      .def("begin", &PageLedger::begin, py::arg("end"), py::arg("height"), py::arg("capacity"))
      .def("grow", &PageLedger::grow, py::arg("end"), py::arg("bytes"))
      .def("finish", &PageLedger::finish, py::arg("end"))
      .def("capacity_up_to", &PageLedger::capacity_up_to, py::arg("wanted"))
      .def_property_readonly("pages", &PageLedger::pages)
      .def_property_readonly("needed", &PageLedger::needed)
      .def("needed_with", &PageLedger::needed_with, py::arg("end"), py::arg("height"), py::arg("capacity"))
      .def("spare", &PageLedger::spare, py::arg("end"))
      .def("give_back", &PageLedger::give_back, py::arg("end"), py::arg("from_"))
      .def("check", &PageLedger::check);
  py::class_<DeviceClock>(m, "DeviceClock", py::module_local())
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
      .def("check", &DeviceClock::check);
}

}  // namespace waterflow
