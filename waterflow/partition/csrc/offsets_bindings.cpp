// What Python sees of the placement of a step's memory.
#include <torch/extension.h>

#include "offsets.h"

namespace py = pybind11;

namespace waterflow {
namespace {

std::vector<Lifetime> lifetimes(const std::vector<std::tuple<int32_t, int32_t, int64_t>>& given) {
  std::vector<Lifetime> made;
  made.reserve(given.size());
  for (const auto& [birth, death, size] : given) made.push_back({birth, death, size});
  return made;
}

}  // namespace

void bind_offsets(py::module_& m) {
  py::enum_<PlacementOrder>(m, "PlacementOrder")
      .value("death", PlacementOrder::death)
      .value("life", PlacementOrder::life)
      .value("birth", PlacementOrder::birth)
      .value("size", PlacementOrder::size)
      .value("area", PlacementOrder::area);
  py::class_<Placement>(m, "Placement")
      .def_readonly("offsets", &Placement::offsets)
      .def_readonly("heights", &Placement::heights)
      .def_readonly("height", &Placement::height)
      .def_readonly("area", &Placement::area);
  m.def(
      "placement_order",
      [](const std::vector<std::tuple<int32_t, int32_t, int64_t>>& lives, PlacementOrder order) {
        return placement_order(lifetimes(lives), order);
      },
      py::arg("lives"), py::arg("order"));
  m.def(
      "place_in_order",
      [](const std::vector<std::tuple<int32_t, int32_t, int64_t>>& lives, const std::vector<int32_t>& order,
         int32_t operations) {
        const auto given = lifetimes(lives);
        py::gil_scoped_release release;
        return place_in_order(given, order, operations);
      },
      py::arg("lives"), py::arg("order"), py::arg("operations"));
  m.def(
      "place",
      [](const std::vector<std::tuple<int32_t, int32_t, int64_t>>& lives, int32_t operations, int64_t work) {
        const auto given = lifetimes(lives);
        py::gil_scoped_release release;
        return place(given, operations, work);
      },
      py::arg("lives"), py::arg("operations"), py::arg("work"));
  py::class_<Walk>(m, "Walk")
      .def_readonly("during", &Walk::during)
      .def_readonly("after", &Walk::after)
      .def_property_readonly("overlap", [](const Walk& self) -> py::object {
        if (self.one < 0) return py::none();
        return py::make_tuple(self.one, self.other, self.shared_at, self.shared);
      });
  m.def(
      "walk_offsets",
      [](const std::vector<std::tuple<int32_t, int32_t, int64_t>>& lives, const std::vector<int64_t>& offsets,
         int32_t operations) {
        const auto given = lifetimes(lives);
        py::gil_scoped_release release;
        return walk(given, offsets, operations);
      },
      py::arg("lives"), py::arg("offsets"), py::arg("operations"));
}

}  // namespace waterflow
