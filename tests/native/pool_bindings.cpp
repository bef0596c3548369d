// What Python sees of steps that ask one pool for memory.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <tuple>

#include "pool_replay.h"

namespace py = pybind11;

namespace waterflow {
namespace {

using Group = std::tuple<int32_t, int32_t, int32_t>;  // job, first operation, one past the last

PoolGroup group_of(const std::optional<Group>& given) {
  if (!given) return {};
  const auto& [job, begin, end] = *given;
  return {job, begin, end};
}

}  // namespace

void bind_pool_replay(py::module_& m) {
  py::class_<PoolStep, std::shared_ptr<PoolStep>>(m, "PoolStep")
      .def(py::init([](const std::vector<std::tuple<int64_t, int64_t, int64_t>>& work,
                       const std::vector<int32_t>& births, const std::vector<int32_t>& deaths,
                       std::vector<int64_t> bytes, int64_t copy_ns) {
             std::vector<Work> made;
             made.reserve(work.size());
             for (const auto& [nanoseconds, memory, compute] : work) made.push_back({nanoseconds, memory, compute});
             return std::make_shared<PoolStep>(std::move(made), births, deaths, std::move(bytes), copy_ns);
           }),
           py::arg("work"), py::arg("births"), py::arg("deaths"), py::arg("bytes"), py::arg("copy_ns") = 0);

  py::class_<PoolResult>(m, "PoolResult")
      .def_readonly("refused", &PoolResult::refused)
      .def_readonly("requests", &PoolResult::requests)
      .def_readonly("peak", &PoolResult::peak)
      .def_readonly("reach", &PoolResult::reach)
      .def_readonly("waits", &PoolResult::waits)
      .def_readonly("makespan", &PoolResult::makespan)
      .def_readonly("overlapped", &PoolResult::overlapped)
      .def_readonly("alone", &PoolResult::alone);

  m.def(
      "replay_pairs",
      [](const std::vector<std::shared_ptr<PoolStep>>& jobs,
         const std::vector<std::pair<std::optional<Group>, std::optional<Group>>>& pairs, int64_t limit,
         int32_t iterations, bool check) {
        py::gil_scoped_release release;
        std::vector<PoolPair> made;
        for (const auto& [one, other] : pairs) made.push_back({group_of(one), group_of(other)});
        return replay_pairs({jobs.begin(), jobs.end()}, made, limit, iterations, check);
      },
      py::arg("jobs"), py::arg("pairs"), py::arg("limit"), py::arg("iterations"), py::arg("check") = false,
      "Pairs of groups (job, begin, end), None where a stream stays idle, on two streams; see pool_replay.h.");
  m.def(
      "replay_operations",
      [](const std::vector<std::shared_ptr<PoolStep>>& jobs, const std::vector<std::pair<int32_t, int32_t>>& operations,
         int64_t limit, bool check) {
        py::gil_scoped_release release;
        return replay_operations({jobs.begin(), jobs.end()}, operations, limit, check);
      },
      py::arg("jobs"), py::arg("operations"), py::arg("limit"), py::arg("check") = false,
      "Operations (job, number) in the order of their issue, on one stream; see pool_replay.h.");
}

}  // namespace waterflow
