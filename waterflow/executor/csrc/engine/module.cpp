// waterflow._C: what Python sees of the engine.

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "waterflow/allocator/csrc/meter.h"
#include "waterflow/executor/csrc/engine/admission.h"
#include "waterflow/executor/csrc/engine/engine.h"
#include "waterflow/executor/csrc/engine/simulation.h"
#include "waterflow/executor/csrc/engine/step_call.h"
#include "waterflow/executor/csrc/graphs/step_graphs.h"
#include "waterflow/executor/csrc/program/bound_program.h"
#include "waterflow/executor/csrc/program/collected.h"
#include "waterflow/executor/csrc/program/program.h"
#include "waterflow/partition/csrc/observer.h"

namespace py = pybind11;

extern const char* const waterflow_sources;  // setup.py

namespace waterflow {

void bind_offsets(py::module_& m);     // partition/csrc/offsets.cpp
void bind_memory(py::module_& m);      // allocator/csrc/allocator_bindings.cpp
void bind_cuda(py::module_& m);        // allocator/csrc/allocator_bindings.cpp
void bind_programs(py::module_& m);    // csrc/program/program_bindings.cpp
void bind_simulation(py::module_& m);  // below
void bind_generators(py::module_& m);  // csrc/program/program_bindings.cpp
void bind_guards(py::module_& m);      // csrc/program/program_bindings.cpp

namespace {

// Engines that are there when Python ends: a lane that then comes for the interpreter lock would abort the process.
struct OpenEngines {
  std::mutex lock;
  std::vector<std::weak_ptr<Engine>> engines;

  void add(const std::shared_ptr<Engine>& engine) {
    std::lock_guard<std::mutex> guard(lock);
    std::erase_if(engines, [](const auto& other) { return other.expired(); });
    engines.push_back(engine);
  }
  void close() {
    std::vector<std::weak_ptr<Engine>> all;
    {
      std::lock_guard<std::mutex> guard(lock);
      all.swap(engines);
    }
    for (const auto& weak : all) {
      if (auto engine = weak.lock()) engine->close();
    }
  }
};

OpenEngines& open_engines() {
  static auto* open = new OpenEngines;
  return *open;
}

// A property read without the interpreter lock: lanes may hold the engine's lock while they wait for it.
template <typename Method>
py::cpp_function unlocked(Method method) {
  return py::cpp_function(method, py::call_guard<py::gil_scoped_release>());
}

// A row of numbers for each entry.
template <typename Entries, typename Row>
at::Tensor table_of(const Entries& entries, const Row& row) {
  constexpr auto columns = static_cast<int64_t>(std::tuple_size_v<decltype(row(entries[0]))>);
  auto table = at::empty({static_cast<int64_t>(entries.size()), columns}, at::kLong);
  auto* to = table.template mutable_data_ptr<int64_t>();
  for (const auto& entry : entries) to = std::ranges::copy(row(entry), to).out;
  return table;
}

at::Tensor profile_table(const StepRun& run) {
  return table_of(run.profiled.instructions,
                  [](const auto& e) { return std::array{e.peak, e.net, e.nanoseconds, e.requests}; });
}

// (bytes, birth, death) of each request; the first request of each instruction, and the end; the tick of each one's
// end.
std::tuple<at::Tensor, std::vector<int32_t>, std::vector<int32_t>> request_table(const StepRun& run) {
  const auto& log = run.profiled.log;
  auto first = log.first;
  first.push_back(static_cast<int32_t>(log.requests.size()));
  const auto row = [](const auto& r) { return std::array<int64_t, 3>{r.bytes, r.birth, r.death}; };
  return {table_of(log.requests, row), first, log.ends};
}

at::Tensor span_table(const std::vector<Span>& spans) {
  return table_of(spans, [](const Span& s) {
    return std::array{s.job, s.step, s.group, s.lane, s.start_ns, s.end_ns, s.held, s.held_by_job};
  });
}

}  // namespace
}  // namespace waterflow

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace waterflow;
  m.attr("built_with_torch") = WATERFLOW_TORCH_VERSION;
  m.attr("built_from") = waterflow_sources;
  bind_offsets(m);
  if (!observer::add_to_module(m.ptr())) throw py::error_already_set();
  bind_cuda(m);
  bind_programs(m);
  bind_memory(m);
  bind_simulation(m);
  bind_generators(m);
  bind_guards(m);
  py::register_exception<Cancelled>(m, "Cancelled", PyExc_RuntimeError);
  const auto& node_error = py::register_exception<NodeError>(m, "NodeError", PyExc_RuntimeError);
  py::register_exception<NodeIndexError>(m, "NodeIndexError", node_error);

  py::class_<GroupPlan, std::shared_ptr<GroupPlan>>(m, "GroupPlan")
      .def(py::init([](std::vector<int32_t> ends, std::vector<int64_t> peak, std::vector<int64_t> after,
                       int64_t expected_ns, std::shared_ptr<RequestPlan> requests) {
             auto plan = std::make_shared<GroupPlan>(std::move(ends), Heights(std::move(peak), std::move(after)));
             plan->expected_ns = expected_ns;
             plan->requests = std::move(requests);
             return plan;
           }),
           py::arg("ends"), py::arg("peak"), py::arg("after"), py::arg("expected_ns") = 0,
           py::arg("requests") = nullptr)
      .def_property_readonly("largest", [](const GroupPlan& self) { return self.heights.largest(); });

  py::class_<StepRun, std::shared_ptr<StepRun>>(m, "StepRun", collected<StepRun, std::shared_ptr<StepRun>>())
      .def_readonly("done", &StepRun::done)
      .def_property_readonly("failed", [](const StepRun& self) { return self.done && self.error != nullptr; })
      .def_readwrite("by_caller", &StepRun::by_caller)
      .def_readonly("failed_node", &StepRun::failed_node)
      .def_readonly("waited_ns", &StepRun::waited_ns)
      .def_property_readonly("planned", [](const StepRun& self) { return self.placed.planned; })
      .def_property_readonly("missed", [](const StepRun& self) { return self.placed.missed; })
      .def("outputs", &outputs)
      .def("profile", &profile_table)
      .def("requests", &request_table)
      .def("run_alone", [](const std::shared_ptr<StepRun>& self) {
        py::gil_scoped_release release;
        run_alone(*self);
      });
  m.def(
      "opaque_run",
      [](int64_t height, const py::object& callable) {
        auto run = std::make_shared<StepRun>();
        run->plan = std::make_shared<GroupPlan>(std::vector<int32_t>{1}, Heights({height}, {0}));
        run->work(callable.ptr());
        return run;
      },
      py::arg("height"), py::arg("callable"), "A step of one group that reaches so many bytes.");

  m.def("set_threads_here", &set_threads_here,
        "Intra-op threads of the calling thread alone; what other threads use stays as it is.");
  m.def(
      "metered",
      [](const py::object& work, bool cuda) {
        MeterGuard meter(nullptr, cuda ? c10::DeviceType::CUDA : c10::DeviceType::CPU);
        py::object result = work();
        return py::make_tuple(std::move(result), meter.peak());
      },
      py::arg("work"), py::arg("cuda") = false,
      "Calls `work()`; returns its result and the most bytes that this thread's requests held meanwhile.");

  py::class_<Engine, std::shared_ptr<Engine>>(m, "Engine")
      .def(py::init([](int32_t lanes, int32_t threads_per_lane, int64_t capacity, bool arenas,
                       std::optional<uint64_t> async_host, OrderFault fault, std::shared_ptr<CudaDevice> cuda,
                       const std::vector<uintptr_t>& handles, int64_t graphs) {
             std::optional<AsyncHost> how;
             if (async_host) how = AsyncHost{{*async_host, 0.2, 2000}, fault};
             std::optional<OnCuda> on_cuda;
             if (cuda) {
               on_cuda = OnCuda{std::move(cuda), {}, graphs};
               for (const uintptr_t handle : handles) on_cuda->given.push_back(reinterpret_cast<cu::Stream>(handle));
             }
             // Its last owner may hold the interpreter lock, which a lane may be waiting for, or be one of its lanes.
             std::shared_ptr<Engine> made(new Engine(lanes, threads_per_lane, capacity, arenas, how, on_cuda),
                                          [](Engine* engine) {
                                            if (engine->inherited())
                                              return;  // its locks may be held by threads that are not here
                                            if (engine->on_a_lane()) {
                                              std::thread([engine] { delete engine; }).detach();
                                            } else if (PyGILState_Check()) {
                                              py::gil_scoped_release release;
                                              delete engine;
                                            } else {
                                              delete engine;
                                            }
                                          });
             open_engines().add(made);
             return made;
           }),
           py::arg("lanes"), py::arg("threads_per_lane"), py::arg("capacity"), py::arg("arenas") = true,
           py::arg("async_host") = std::nullopt, py::arg("fault") = OrderFault::none, py::arg("cuda") = nullptr,
           py::arg("handles") = std::vector<uintptr_t>{}, py::arg("graphs") = 0,
           "With `cuda`, a CudaDevice: lanes on streams that it lends until the engine is closed, two for each. With "
           "`handles`, for tests: on these of the driver's, and the host's memory is planned in the device's arenas. "
           "`graphs`: bytes that copies of inputs of device graphs may take.")
      .def("limit_memory", &Engine::limit_memory, py::arg("bytes"), py::call_guard<py::gil_scoped_release>())
      .def("add_job", &Engine::add_job, py::call_guard<py::gil_scoped_release>())
      .def("remove_job", &Engine::remove_job, py::call_guard<py::gil_scoped_release>())
      .def("submit", &Engine::submit, py::arg("job"), py::arg("run"), py::arg("after") = nullptr,
           py::call_guard<py::gil_scoped_release>())
      .def("leave", &Engine::leave, py::arg("job"), py::call_guard<py::gil_scoped_release>())
      .def("cancel", &Engine::cancel, py::call_guard<py::gil_scoped_release>())
      .def("wait", &wait_done)
      .def("close", &Engine::close, py::call_guard<py::gil_scoped_release>())
      .def("set_capacity", &Engine::set_capacity, py::call_guard<py::gil_scoped_release>())
      .def("set_active_lanes", &Engine::set_active_lanes, py::call_guard<py::gil_scoped_release>())
      .def("set_fifo_lanes", &Engine::set_fifo_lanes, py::call_guard<py::gil_scoped_release>())
      .def("set_opportunistic", &Engine::set_opportunistic, py::arg("job"), py::arg("opportunistic"),
           py::call_guard<py::gil_scoped_release>())
      .def("set_rates", &Engine::set_rates, py::arg("beside"), py::arg("between"))
      .def_property_readonly("opportunistic_ns", unlocked(&Engine::opportunistic_ns))
      .def("take_step_times",
           [](Engine& self) {
             std::vector<StepTime> times;
             {
               py::gil_scoped_release release;
               times = self.take_step_times();
             }
             py::list rows;
             for (const auto& t : times) rows.append(py::make_tuple(t.job, t.ready_ns, t.ended_ns, t.busy_ns));
             return rows;
           })
      .def_property_readonly("active_lanes", unlocked(&Engine::active_lanes))
      .def_property_readonly("capacity", unlocked(&Engine::capacity))
      .def_property_readonly("held", unlocked(&Engine::held))
      .def_property_readonly("waiting_for_room", unlocked(&Engine::waiting_for_room))
      .def_property_readonly("peak_held", unlocked(&Engine::peak_held))
      .def_property_readonly("on_a_lane", &Engine::on_a_lane)
      .def_property_readonly("lanes", &Engine::lanes)
      .def_property_readonly("pages_in_use", unlocked(&Engine::pages_in_use))
      .def_property_readonly("detached", unlocked(&Engine::detached))
      .def_property_readonly("placed", unlocked([](const Engine& self) {
                               const auto counts = self.placed();
                               return std::make_tuple(counts.planned, counts.missed, counts.outside);
                             }))
      .def_property_readonly("graphs", unlocked([](const Engine& self) {
                               const auto counts = self.graphs() ? self.graphs()->counts() : GraphCounts{};
                               return std::map<std::string, int64_t>{{"captured", counts.captured},
                                                                     {"launched", counts.launched},
                                                                     {"dropped", counts.dropped},
                                                                     {"bytes", counts.bytes}};
                             }))
      .def(
          "take_graph_refusals",
          [](const Engine& self) {
            return self.graphs() ? self.graphs()->take_refusals() : std::vector<std::pair<int64_t, std::string>>{};
          },
          py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("steps_done", unlocked(&Engine::steps_done))
      .def_property_readonly("progress_ns", unlocked(&Engine::progress_ns))
      .def_property_readonly("groups_done", unlocked(&Engine::groups_done))
      .def_property_readonly("scheduling_ns", unlocked(&Engine::scheduling_ns))
      .def_property_readonly("lane_busy_ns", unlocked(&Engine::lane_busy_ns))
      .def("queued", &Engine::queued, py::call_guard<py::gil_scoped_release>())
      .def("record_spans", &Engine::record_spans, py::arg("on"), py::arg("most") = 1 << 20,
           py::call_guard<py::gil_scoped_release>())
      .def("take_spans",
           [](Engine& self) {
             py::gil_scoped_release release;
             return span_table(self.take_spans());
           })
      .def("check", &Engine::check, py::call_guard<py::gil_scoped_release>())
      .def_static("now_ns", &now_ns);

  py::class_<Flag>(m, "Flag")
      .def(py::init<>())
      .def_property(
          "raised", [](const Flag& self) { return self.raised.load(); }, [](Flag& self, bool to) { self.raised = to; });
  py::class_<StepCall>(m, "StepCall", collected<StepCall>())
      .def(py::init<const py::object&, std::shared_ptr<GroupPlan>, std::vector<int32_t>, std::vector<int32_t>,
                    const py::object&, const py::bytes&, std::vector<StepCall::Ranges>, int32_t, Engine::Id,
                    std::shared_ptr<Engine>>(),
           py::arg("binding"), py::arg("plan"), py::arg("slots"), py::arg("places"), py::arg("batch"),
           py::arg("ambient"), py::arg("changed"), py::arg("threads"), py::arg("job") = -1, py::arg("engine") = nullptr)
      .def_property_readonly("knows_form", &StepCall::knows_form)
      .def_property_readonly("failed_node", &StepCall::failed_node)
      .def("run", &StepCall::run)
      .def("run_all", &StepCall::run_all, py::arg("batches"), py::arg("flag"), py::arg("losses"))
      .def(
          "submit",
          [](StepCall& self, const py::object& batch, bool by_caller, const std::shared_ptr<StepRun>& before) {
            return py::object(py::cast(self.submit(batch, by_caller, before)));
          },
          py::arg("batch"), py::arg("by_caller"), py::arg("before") = nullptr)
      .def("take_requests", &StepCall::take_requests);

  m.def("close_engines", [] { open_engines().close(); }, py::call_guard<py::gil_scoped_release>());
  py::module_::import("atexit").attr("register")(m.attr("close_engines"));
}

// What Python sees of simulated runs.

namespace py = pybind11;

namespace waterflow {

void bind_simulation(py::module_& m) {
  py::enum_<OrderFault>(m, "OrderFault")
      .value("none", OrderFault::none)
      .value("heights_at_events", OrderFault::heights_at_events)
      .value("dropped_waits", OrderFault::dropped_waits);
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
           py::arg("copy_ns") = 0)
      .def_readonly_static("whole", &Work::kWhole);

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
      .def_readonly("waits", &SimulationResult::waits)
      .def_readonly("steps", &SimulationResult::steps)
      .def_readonly("races", &SimulationResult::races)
      .def_readonly("told", &SimulationResult::told)
      .def_readonly("spans", &SimulationResult::spans);

  m.def(
      "simulate",
      [](const std::vector<std::pair<std::shared_ptr<SimulatedStep>, int32_t>>& jobs, int64_t arena, int32_t run_ahead,
         uint64_t seed, int32_t stalled, int64_t stall_ns, bool host_learns, OrderFault fault, bool early_issue) {
        py::gil_scoped_release release;
        Simulation simulation({arena, run_ahead, seed, stalled, stall_ns, host_learns, fault, early_issue});
        for (const auto& [step, steps] : jobs) simulation.add_job(step, steps);
        return simulation.run();
      },
      py::arg("jobs"), py::arg("arena"), py::arg("run_ahead") = 2, py::arg("seed") = 0, py::arg("stalled") = 0,
      py::arg("stall_ns") = 0, py::arg("host_learns") = false, py::arg("fault") = OrderFault::none,
      py::arg("early_issue") = false,
      "Jobs (step, number of steps) on the two lanes of an arena of so many bytes; see csrc/engine/simulation.h.");
}

}  // namespace waterflow
