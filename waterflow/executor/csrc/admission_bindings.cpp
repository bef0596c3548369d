// What Python sees of admission and barriers, for tests.
#include <torch/extension.h>

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "admission.h"
#include "barrier.h"

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
  py::class_<CounterBarrier>(m, "CounterBarrier")
      .def(py::init<int32_t>(), py::arg("parties"))
      .def("arrive", &CounterBarrier::arrive)
      .def("pass_", &CounterBarrier::pass)
      .def("rearm", &CounterBarrier::rearm)
      .def("add_party", &CounterBarrier::add_party)
      .def("remove_party", &CounterBarrier::remove_party)
      .def_property_readonly("open", &CounterBarrier::open)
      .def_property_readonly("parties", &CounterBarrier::parties)
      .def_property_readonly("waiting_for", &CounterBarrier::waiting_for);

  py::class_<OwnedAdmission>(m, "Admission")
      .def(py::init<int64_t>(), py::arg("capacity"))
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
}

}  // namespace waterflow
