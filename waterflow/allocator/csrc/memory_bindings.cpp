// What Python sees of planned memory.
#include <c10/core/CPUAllocator.h>
#include <torch/extension.h>

#include <chrono>

#include "allocator_chain.h"
#include "cpu_arena.h"
#include "cpu_pool.h"
#include "cuda_abi.h"
#include "cuda_arena.h"
#include "lane_allocator.h"
#include "meter.h"
#include "planned_ranges.h"
#include "request_plan.h"

namespace py = pybind11;

namespace waterflow {
namespace {

// Nanoseconds of one planned request with its release, as a lane asks for it: the means of batches of 1,000.
template <class Take, class Give>
std::vector<double> time_requests(Arena& arena, const std::shared_ptr<RequestPlan>& plan, const Take& take,
                                  const Give& give) {
  using clock = std::chrono::steady_clock;
  constexpr int32_t kBatch = 1000, kBatches = 100;
  arena.resize(plan->height());
  if (!arena.back(0, plan->height())) throw std::runtime_error("the device has no memory for the plan's arena");
  Placer& placer = arena.placer(0);
  LaneScope scope(&placer);
  std::vector<std::vector<int32_t>> dies(plan->size());  // behind each request: those that are given back
  for (int32_t i = 0, last = 0; i < plan->size(); ++i) {
    last = i;
    while (last + 1 < plan->size() && plan->request(last + 1).birth <= plan->request(i).death) ++last;
    dies[last].push_back(i);
  }
  std::vector<decltype(take(int64_t{}))> held(plan->size());
  std::vector<double> times;
  clock::duration spent{};
  int32_t made = 0;
  while (times.size() < kBatches) {
    placer.begin(plan);
    for (int32_t instruction = 0; instruction < plan->instructions(); ++instruction) {
      const int32_t first = plan->first(instruction), end = plan->first(instruction + 1);
      const auto start = clock::now();
      placer.instruction(instruction);
      for (int32_t i = first; i < end; ++i) {
        held[i] = take(plan->request(i).bytes);
        for (int32_t dead : dies[i]) give(held[dead], plan->request(dead).bytes);
      }
      spent += clock::now() - start;
      made += end - first;
      if (made < kBatch) continue;
      times.push_back(std::chrono::duration<double, std::nano>(spent).count() / made);
      spent = {};
      made = 0;
    }
    placer.finish();
    if (placer.counts().missed != 0) throw std::logic_error("a plan that is replayed as it is has missed requests");
  }
  return times;
}

// Through torch's allocator of the CPU, or its functions for a GPU.
std::vector<double> time_planned_requests(const std::shared_ptr<RequestPlan>& plan,
                                          const std::shared_ptr<CudaDevice>& device) {
  if (device) {
    CudaArena arena(device, plan->height());
    const int index = device->index();
    return time_requests(
        arena, plan, [index](int64_t bytes) { return waterflow_malloc(bytes, index, nullptr); },
        [index](void* at, int64_t bytes) { waterflow_free(at, bytes, index, nullptr); });
  }
  LaneAllocatorInstalled installed;
  CpuArena arena(plan->height());
  return time_requests(
      arena, plan, [allocator = c10::GetCPUAllocator()](int64_t bytes) { return allocator->allocate(bytes); },
      [](c10::DataPtr& held, int64_t) { held.clear(); });
}

}  // namespace

void bind_memory(py::module_& m) {
  py::class_<RequestPlan, std::shared_ptr<RequestPlan>>(m, "RequestPlan")
      .def(py::init([](const std::vector<std::tuple<int64_t, int64_t, int32_t, int32_t>>& rows,
                       std::vector<int32_t> first, std::vector<int32_t> ends, int64_t alignment) {
             std::vector<PlannedRequest> requests;
             requests.reserve(rows.size());
             for (const auto& [bytes, offset, birth, death] : rows) requests.push_back({bytes, offset, birth, death});
             return std::make_shared<RequestPlan>(std::move(requests), std::move(first), std::move(ends), alignment);
           }),
           py::arg("requests"), py::arg("first"), py::arg("ends"), py::arg("alignment"),
           "From (bytes, offset, birth, death) of each request, and each instruction's first request and end.")
      .def_property_readonly("height", &RequestPlan::height)
      .def_property_readonly("planned", &RequestPlan::planned)
      .def("__len__", &RequestPlan::size);
  m.def("time_planned_requests", &time_planned_requests, py::arg("plan"), py::arg("device") = nullptr,
        py::call_guard<py::gil_scoped_release>());
  m.def("stranded_bytes", &stranded_bytes, "Addresses kept for what steps left behind and somebody still holds.");

  m.def(
      "lanes_are_installed", [] { return AllocatorChain::in_place(AllocatorChain::kLanes); },
      "Whether torch's CPU allocator is the lanes' one now.");
}

}  // namespace waterflow
