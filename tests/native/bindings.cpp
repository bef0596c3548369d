// What tests and benchmarks see of the multi-stream allocator, request logs, random runs and counted memory.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "waterflow/allocator/csrc/stream/stream_allocator.h"
#include "counting_allocator.h"
#include "fuzz.h"
#include "request_log.h"
#include "request_recorder.h"

namespace py = pybind11;

namespace waterflow {

void bind_admission(py::module_& m);    // admission_bindings.cpp
void bind_devices(py::module_& m);      // device_bindings.cpp
void bind_pool_replay(py::module_& m);  // pool_bindings.cpp

namespace {

using Table = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;
using unlocked = py::call_guard<py::gil_scoped_release>;

std::vector<int64_t> plain(const Table& table) {
  if (table.ndim() != 2 || table.shape(1) != COLUMNS) throw UsageError("a table has rows of four numbers");
  return {table.data(), table.data() + table.size()};
}

Table as_table(const std::vector<int64_t>& rows) {
  Table made({static_cast<py::ssize_t>(rows.size()) / COLUMNS, static_cast<py::ssize_t>(COLUMNS)});
  std::copy(rows.begin(), rows.end(), made.mutable_data());
  return made;
}

py::dict tiers(const std::array<int64_t, TIERS>& counts) {
  py::dict made;
  for (int32_t i = 0; i < TIERS; ++i) {
    made[tier_name(static_cast<Tier>(i))] = counts[static_cast<size_t>(i)];
  }
  return made;
}

py::dict as_dict(const AllocatorReport& report) {
  py::dict free;
  for (const auto& [stream, bytes] : report.unsynchronized) free[py::int_(stream)] = bytes;
  py::dict made;
  made["held"] = report.held;
  made["peak"] = report.peak;
  made["grown"] = report.grown;
  made["synchronized"] = report.synchronized;
  made["apart"] = report.apart;
  made["unsynchronized"] = free;
  made["largest_free"] = report.largest_free;
  made["fragmentation"] = report.fragmentation();
  made["waits"] = report.waits;
  made["events"] = report.events;
  made["segments"] = report.segments;
  made["requests"] = report.requests;
  made["tiers"] = tiers(report.tiers);
  return made;
}

void bind_errors(py::module_& m) {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::exception<OutOfMemory>> storage;
  storage.call_once_and_store_result([&] { return py::exception<OutOfMemory>(m, "OutOfMemory", PyExc_MemoryError); });
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const OutOfMemory& error) {
      py::object made = py::reinterpret_borrow<py::object>(storage.get_stored().ptr())(error.what());
      made.attr("needed") = error.needed;
      made.attr("limit") = error.limit;
      PyErr_SetObject(storage.get_stored().ptr(), made.ptr());
    }
  });
}

void bind_logs(py::module_& m) {
  py::class_<RequestLog>(m, "RequestLog")
      .def(py::init([](const Table& table) { return RequestLog(plain(table)); }), py::arg("table"))
      .def("replay", &RequestLog::replay, py::arg("allocator"), py::arg("device"), py::arg("repeats") = 1,
           py::arg("streams") = std::vector<StreamId>(), unlocked())
      .def("replay_malloc", &RequestLog::replay_malloc, py::arg("repeats") = 1, unlocked())
      .def_property_readonly("requests", &RequestLog::requests)
      .def_property_readonly("streams", &RequestLog::streams)
      .def_property_readonly("peak", &RequestLog::peak);
  m.def(
      "record_requests",
      [](const py::object& work) {
        auto recorder = std::make_shared<RequestRecorder>();
        py::object result;
        {
          c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, recorder);
          result = work();
        }
        return py::make_tuple(std::move(result), as_table(recorder->take()));
      },
      "Calls `work()`; returns its result, and what this thread asked torch's allocators for as a request log.");
}

void bind_fuzz(py::module_& m) {
  m.def(
      "fuzz_table",
      [](uint64_t seed, int64_t rows, int32_t streams, int64_t capacity, int64_t largest, bool renew) {
        return as_table(fuzz_table({seed, rows, streams, capacity, largest, renew}));
      },
      py::arg("seed"), py::arg("rows"), py::arg("streams"), py::arg("capacity"), py::arg("largest"), py::arg("renew"));
  m.def(
      "run_fuzz",
      [](const Table& table, bool simulated, int32_t streams, int32_t threads, int64_t capacity, int64_t check_every,
         uint64_t seed, double stall_share, int64_t stall_us, int64_t alignment, Fault fault, bool checked) {
        const auto rows = plain(table);
        FuzzResult result;
        {
          py::gil_scoped_release release;
          result = run_fuzz(rows, {simulated, streams, threads, capacity, check_every, seed, stall_share, stall_us,
                                   alignment, fault, checked});
        }
        py::dict made;
        made["error"] = result.error;
        made["row"] = result.row;
        made["operations"] = result.operations;
        made["requests"] = result.requests;
        made["checks"] = result.checks;
        made["waits"] = result.waits;
        made["tiers"] = tiers(result.tiers);
        return made;
      },
      py::arg("table"), py::arg("simulated"), py::arg("streams"), py::arg("threads"), py::arg("capacity"),
      py::arg("check_every"), py::arg("seed"), py::arg("stall_share"), py::arg("stall_us"), py::arg("alignment"),
      py::arg("fault"), py::arg("checked"));
}

void bind_allocator(py::module_& m) {
  py::enum_<Fault>(m, "Fault")
      .value("none", Fault::none)
      .value("dropped_wait", Fault::dropped_wait)
      .value("no_rerecord", Fault::no_rerecord)
      .value("free_under_allocator", Fault::free_under_allocator)
      .value("free_under_last_user", Fault::free_under_last_user)
      .value("synchronized_too_soon", Fault::synchronized_too_soon)
      .value("reused_handle", Fault::reused_handle)
      .value("split_off_by_one", Fault::split_off_by_one)
      .value("merge_across_sets", Fault::merge_across_sets);

  py::class_<StreamAllocator, std::shared_ptr<StreamAllocator>>(m, "StreamAllocator")
      .def(py::init([](std::shared_ptr<Device> device, int64_t limit, int64_t alignment, int64_t small_segment,
                       int64_t medium_segment, Fault fault) {
             AllocatorOptions options{.alignment = alignment,
                                      .limit = limit,
                                      .small_segment = small_segment,
                                      .medium_segment = medium_segment,
                                      .fault = fault};
             // Its end waits for the device, whose work may want the interpreter lock.
             return std::shared_ptr<StreamAllocator>(new StreamAllocator(std::move(device), options),
                                                     [](StreamAllocator* allocator) {
                                                       if (!PyGILState_Check()) return delete allocator;
                                                       py::gil_scoped_release release;
                                                       delete allocator;
                                                     });
           }),
           py::arg("device"), py::arg("limit") = NO_LIMIT, py::arg("alignment") = 64,
           py::arg("small_segment") = AllocatorOptions().small_segment,
           py::arg("medium_segment") = AllocatorOptions().medium_segment, py::arg("fault") = Fault::none,
           py::keep_alive<1, 2>())
      .def("add_stream", &StreamAllocator::add_stream, py::arg("stream"), unlocked())
      .def("remove_stream", &StreamAllocator::remove_stream, py::arg("stream"), unlocked())
      .def("allocate", &StreamAllocator::allocate, py::arg("bytes"), py::arg("stream"), unlocked())
      .def("release", &StreamAllocator::release, py::arg("address"), unlocked())
      .def("use", &StreamAllocator::use, py::arg("address"), py::arg("stream"), unlocked())
      .def("end_use", &StreamAllocator::end_use, py::arg("address"), py::arg("stream"), unlocked())
      .def("mark", &StreamAllocator::mark, py::arg("stream"), unlocked())
      .def("wait", &StreamAllocator::wait, py::arg("stream"), py::arg("mark"), unlocked())
      .def("waited", &StreamAllocator::waited, py::arg("stream"), py::arg("mark"), unlocked())
      .def("trim", &StreamAllocator::trim, unlocked())
      .def("set_limit", &StreamAllocator::set_limit, py::arg("bytes"), unlocked())
      .def("report",
           [](const StreamAllocator& self) {
             AllocatorReport made;
             {
               py::gil_scoped_release release;
               made = self.report();
             }
             return as_dict(made);
           })
      .def("limit", &StreamAllocator::limit, unlocked())
      .def("map", &StreamAllocator::map, py::arg("width") = 64, unlocked())
      .def("check", &StreamAllocator::check, unlocked());
}

void bind_counting(py::module_& m) {
  m.def("start_counting", [] { return reinterpret_cast<uintptr_t>(start_counting()); });
  m.def("restart_peak", &restart_peak);
  m.def("counted_now", &counted_now);
  m.def("counted_peak", &counted_peak);
}

}  // namespace
}  // namespace waterflow

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace waterflow;
  bind_admission(m);
  bind_devices(m);
  bind_errors(m);
  bind_allocator(m);
  bind_logs(m);
  bind_fuzz(m);
  bind_counting(m);
  bind_pool_replay(m);
}
