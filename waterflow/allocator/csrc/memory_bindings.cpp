// What Python sees of planned memory and of the counting allocator.
#include <torch/extension.h>

#include "allocator_chain.h"
#include "cpu_pool.h"
#include "meter.h"
#include "planned_ranges.h"
#include "request_plan.h"

namespace py = pybind11;

namespace waterflow {

void bind_memory(py::module_& m) {
  py::class_<RequestPlan, std::shared_ptr<RequestPlan>>(m, "RequestPlan")
      .def(py::init([](const std::vector<std::tuple<int64_t, int64_t, int32_t, int32_t>>& rows,
                       std::vector<int32_t> first, int64_t alignment) {
             std::vector<PlannedRequest> requests;
             requests.reserve(rows.size());
             for (const auto& [bytes, offset, birth, death] : rows) requests.push_back({bytes, offset, birth, death});
             return std::make_shared<RequestPlan>(std::move(requests), std::move(first), alignment);
           }),
           py::arg("requests"), py::arg("first"), py::arg("alignment"),
           "From (bytes, offset, birth, death) of each request, and the first request of each instruction.")
      .def_property_readonly("height", &RequestPlan::height)
      .def_property_readonly("planned", &RequestPlan::planned)
      .def("__len__", &RequestPlan::size);
  m.def("stranded_bytes", &stranded_bytes, "Addresses kept for what steps left behind and somebody still holds.");

  m.def(
      "lanes_are_installed", [] { return AllocatorChain::in_place(AllocatorChain::kLanes); },
      "Whether torch's CPU allocator is the lanes' one now.");

  py::class_<CountingAllocator>(m, "CountingAllocator")
      .def_static("start", &CountingAllocator::start)
      .def_static("stop", &CountingAllocator::stop)
      .def_static("reset_peak", &CountingAllocator::reset_peak)
      .def_static("current", &CountingAllocator::current)
      .def_static("peak", &CountingAllocator::peak);
}

}  // namespace waterflow
