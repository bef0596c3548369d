// What Python sees of planned memory.

#include <c10/core/CPUAllocator.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <chrono>
#include <optional>

#include "waterflow/allocator/csrc/cpu/cpu_arena.h"
#include "waterflow/allocator/csrc/cpu/lane_allocator.h"
#include "waterflow/allocator/csrc/cuda/captures.h"
#include "waterflow/allocator/csrc/cuda/cuda_arena.h"
#include "waterflow/allocator/csrc/cuda/cuda_device.h"
#include "waterflow/allocator/csrc/cuda/cuda_memory.h"
#include "waterflow/allocator/csrc/meter.h"
#include "waterflow/allocator/csrc/planned/arena.h"
#include "waterflow/allocator/csrc/planned/placer.h"

namespace py = pybind11;

namespace waterflow {
namespace {

// Nanoseconds of one planned request with its release through torch's allocator, as a lane of a CPU asks for it: the
// means of batches of 1,000.
std::vector<double> time_planned_requests(const std::shared_ptr<RequestPlan>& plan) {
  using clock = std::chrono::steady_clock;
  constexpr int32_t kBatch = 1000, kBatches = 100;
  LaneAllocatorInstalled installed;
  CpuArena arena(plan->height());
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
  std::vector<c10::DataPtr> held(plan->size());
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
        held[i] = c10::GetCPUAllocator()->allocate(plan->request(i).bytes);
        for (int32_t dead : dies[i]) held[dead].clear();
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
  m.def("time_planned_requests", &time_planned_requests, py::arg("plan"), py::call_guard<py::gil_scoped_release>());
  m.def("detached_bytes", &detached_bytes, "Addresses kept for what steps left behind and somebody still holds.");

  m.def(
      "lanes_are_installed", [] { return AllocatorChain::in_place(AllocatorChain::kLanes); },
      "Whether torch's CPU allocator is the lanes' one now.");
}

}  // namespace waterflow

// What Python sees of GPUs: for tests, and for what is set up before training.

namespace py = pybind11;

namespace waterflow {
namespace {

CUstream_st* stream_at(uintptr_t handle) { return reinterpret_cast<CUstream_st*>(handle); }

template <class Function>
uintptr_t address_of(Function* function) {
  return reinterpret_cast<uintptr_t>(function);
}

void bind_cuda_memory(py::module_& m) {
  using unlocked = py::call_guard<py::gil_scoped_release>;
  m.def("cuda_hooks", [] {
    py::dict hooks;
    hooks["waterflow_malloc"] = address_of(&waterflow_malloc);
    hooks["waterflow_free"] = address_of(&waterflow_free);
    hooks["set_record_stream_fn"] = address_of(&waterflow_record_stream);
    hooks["set_reset_fn"] = address_of(&waterflow_empty_cache);
    hooks["set_memory_fraction_fn"] = address_of(&waterflow_memory_fraction);
    hooks["set_begin_allocate_to_pool"] = address_of(&waterflow_begin_pool);
    hooks["set_end_allocate_to_pool_fn"] = address_of(&waterflow_end_pool);
    hooks["set_release_pool"] = address_of(&waterflow_release_pool);
    return hooks;
  });
  m.def(
      "cuda_pool", [](int device, int64_t limit) { CudaMemory::of(device).pool(limit); }, py::arg("device"),
      py::arg("limit"), unlocked());
  m.def("cuda_stats", [](int device) {
    const auto now = CudaMemory::of(device).stats();
    py::dict made;
    made["allocated"] = now.allocated;
    made["peak_allocated"] = now.peak_allocated;
    made["reserved"] = now.reserved;
    made["peak_reserved"] = now.peak_reserved;
    made["planned"] = now.planned;
    made["pooled"] = now.pooled;
    made["others"] = now.others;
    return made;
  });
  py::class_<CudaLimit>(m, "CudaLimit")
      .def(py::init([](int device, int64_t bytes, const std::vector<StreamId>& lanes, CudaArena& arena) {
             const auto give_back = [&arena] { arena.discard(0, 0, arena.size()); };
             return std::make_unique<CudaLimit>(device, bytes, lanes, give_back);
           }),
           py::arg("device"), py::arg("bytes"), py::arg("lanes"), py::arg("arena"), py::keep_alive<1, 5>())
      .def("claim", &CudaLimit::claim, py::arg("bytes"));
  m.def("cuda_give_back", [](int device) { return CudaMemory::of(device).give_back(); }, unlocked());
  m.def(
      "beside_captures",
      [](const py::function& call, const py::args& given) {
        std::optional<BesideCaptures> beside;
        {
          const py::gil_scoped_release released;
          beside.emplace();
        }
        return call(*given);
      },
      py::arg("call"));
  m.def("cuda_reset_peaks", [](int device) { CudaMemory::of(device).reset_peaks(); });
  m.def("cuda_map", [](int device) { return CudaMemory::of(device).map(); });
  m.def("cuda_device", [](int device) { return CudaMemory::of(device).device(); });

  // What torch does with the functions above, for tests: a caller in C++.
  m.def("cuda_malloc", [](size_t bytes, int device, uintptr_t stream) {
    return reinterpret_cast<uintptr_t>(waterflow_malloc(bytes, device, stream_at(stream)));
  });
  m.def("cuda_free", [](uintptr_t at, size_t bytes, int device, uintptr_t stream) {
    waterflow_free(reinterpret_cast<void*>(at), bytes, device, stream_at(stream));
  });
  m.def("cuda_begin_pool", [](int device, GraphPoolId pool, std::vector<uintptr_t> streams) {
    waterflow_begin_pool(device, pool, [streams = std::move(streams)](CUstream_st* stream) {
      return std::find(streams.begin(), streams.end(), reinterpret_cast<uintptr_t>(stream)) != streams.end();
    });
  });
  m.def("cuda_end_pool", &waterflow_end_pool);
  m.def("cuda_release_pool", &waterflow_release_pool);
  m.def("cuda_memory_fraction", &waterflow_memory_fraction);
}

}  // namespace

void bind_cuda(py::module_& m) {
  using unlocked = py::call_guard<py::gil_scoped_release>;
  py::register_exception<CudaError>(m, "CudaError", PyExc_RuntimeError);

  py::class_<CudaDevice, std::shared_ptr<CudaDevice>>(m, "CudaDevice")
      .def(py::init([](int index, int64_t capacity, const std::string& library) {
             return std::make_shared<CudaDevice>(CudaDriver::load(library), index, capacity);
           }),
           py::arg("index") = 0, py::arg("capacity") = 0, py::arg("library") = "", unlocked())
      .def("reserve", &CudaDevice::reserve, py::arg("bytes"), unlocked())
      .def("unreserve", &CudaDevice::unreserve, py::arg("base"), py::arg("bytes"), unlocked())
      .def("grow", &CudaDevice::grow, py::arg("at"), py::arg("bytes"), unlocked())
      .def("shrink", &CudaDevice::shrink, py::arg("at"), py::arg("bytes"), unlocked())
      .def("add_stream", &CudaDevice::add_stream, unlocked())
      .def("remove_stream", &CudaDevice::remove_stream, py::arg("stream"), unlocked())
      .def("record", &CudaDevice::record, py::arg("stream"), unlocked())
      .def("wait", &CudaDevice::wait, py::arg("stream"), py::arg("event"), unlocked())
      .def("complete", &CudaDevice::complete, py::arg("event"), unlocked())
      .def("synchronize", &CudaDevice::synchronize, py::arg("event"), unlocked())
      .def("forget", &CudaDevice::forget, py::arg("event"), unlocked())
      .def(
          "adopt_stream",
          [](CudaDevice& device, uintptr_t handle) {
            return device.adopt_stream(reinterpret_cast<cu::Stream>(handle));
          },
          py::arg("handle"), unlocked())
      .def("begin_capture", &CudaDevice::begin_capture, py::arg("stream"), unlocked())
      .def(
          "end_capture",
          [](CudaDevice& device, StreamId stream) { return reinterpret_cast<uintptr_t>(device.end_capture(stream)); },
          py::arg("stream"), unlocked())
      .def(
          "launch",
          [](CudaDevice& device, uintptr_t graph, StreamId stream) {
            device.launch(reinterpret_cast<cu::Executable>(graph), stream);
          },
          py::arg("graph"), py::arg("stream"), unlocked())
      .def(
          "destroy",
          [](CudaDevice& device, uintptr_t graph) { device.destroy(reinterpret_cast<cu::Executable>(graph)); },
          py::arg("graph"), unlocked())
      .def("finish", &CudaDevice::finish, unlocked())
      .def_property_readonly("index", &CudaDevice::index)
      .def_property_readonly("granularity", &CudaDevice::granularity)
      .def_property_readonly("capacity", &CudaDevice::capacity)
      .def_property_readonly("grown", &CudaDevice::grown)
      .def_property_readonly("free_memory", &CudaDevice::free_memory)
      .def_property_readonly("library", [](const CudaDevice& device) { return device.driver().library(); });

  py::class_<CudaArena>(m, "CudaArena")
      .def(py::init<std::shared_ptr<CudaDevice>, int64_t, int64_t>(), py::arg("device"), py::arg("most"),
           py::arg("page") = 0)
      .def("resize", &CudaArena::resize, py::arg("bytes"))
      .def("back", &CudaArena::back, py::arg("end"), py::arg("bytes"))
      .def("discard", &CudaArena::discard, py::arg("end"), py::arg("start"), py::arg("stop"))
      .def("detach", &CudaArena::detach, py::arg("end"))
      .def("begin", [](CudaArena& arena, int end, std::shared_ptr<RequestPlan> plan) { arena.placer(end).begin(plan); })
      .def("request",
           [](CudaArena& arena, int end, int instruction, size_t bytes) {
             arena.placer(end).instruction(instruction);
             return reinterpret_cast<uintptr_t>(arena.placer(end).request(bytes));
           })
      .def("malloc_within",
           [](CudaArena& arena, int end, int instruction, size_t bytes, int device, uintptr_t stream) {
             LaneScope scope(&arena.placer(end));
             arena.placer(end).instruction(instruction);
             return reinterpret_cast<uintptr_t>(waterflow_malloc(bytes, device, stream_at(stream)));
           })
      .def("finish",
           [](CudaArena& arena, int end) {
             const bool clean = !arena.placer(end).any_live();
             arena.placer(end).finish();
             return clean;
           })
      .def("base", [](CudaArena& arena, int end) { return reinterpret_cast<uintptr_t>(arena.placer(end).base()); })
      .def("check", &CudaArena::check)
      .def_property_readonly("most", &CudaArena::most)
      .def_property_readonly("size", &CudaArena::size)
      .def_property_readonly("unit", &CudaArena::unit)
      .def_property_readonly("pages", &CudaArena::pages);
  bind_cuda_memory(m);
  m.def("release_planned", [](uintptr_t at) { return release_planned(reinterpret_cast<void*>(at)); });
}

}  // namespace waterflow
