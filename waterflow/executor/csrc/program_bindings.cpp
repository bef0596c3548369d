// What Python sees of programs, and of their bindings to a job's tensors.
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/extension.h>

#include <algorithm>

#include "binding.h"
#include "program.h"
#include "short_products.h"

namespace py = pybind11;

namespace waterflow {
namespace {

Instruction make_instruction(const std::string& name, const std::string& overload, const py::list& arguments,
                             std::vector<int32_t> results, std::vector<int32_t> drops, const py::list& expected,
                             bool result_is_list, bool random) {
  auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
  Instruction instruction;
  instruction.op = op;
  instruction.results = std::move(results);
  instruction.drops = std::move(drops);
  instruction.result_is_list = result_is_list;
  instruction.draws = random;
  const auto& schema = op.schema();
  TORCH_CHECK(arguments.size() == schema.arguments().size(), name, " takes ", schema.arguments().size(),
              " arguments; got ", arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto entry = arguments[i].cast<py::tuple>();
    const auto kind = entry[0].cast<std::string>();
    Argument argument;
    if (kind == "constant") {
      const auto& type = schema.arguments()[i].type();
      if (type->isSubtypeOf(*c10::TensorType::get()) && !entry[1].is_none() && !THPVariable_Check(entry[1].ptr())) {
        argument.value = wrapped_number(torch::jit::toIValue(entry[1], c10::NumberType::get()).toScalar());
      } else {
        argument.value = torch::jit::toIValue(entry[1], type);
      }
    } else if (kind == "slot") {
      argument.kind = Argument::Kind::slot;
      argument.slot = entry[1].cast<int32_t>();
      argument.last_use = entry[2].cast<bool>();
    } else if (kind == "generator") {
      argument.kind = Argument::Kind::generator;
      random = false;
    } else if (kind == "list") {
      argument.kind = Argument::Kind::tensor_list;
      argument.slots = entry[1].cast<std::vector<int32_t>>();
    } else {
      argument.kind = Argument::Kind::optional_tensor_list;
      argument.slots = entry[1].cast<std::vector<int32_t>>();
    }
    instruction.arguments.push_back(std::move(argument));
  }
  instruction.draws_by_default = random;
  const bool plain = std::all_of(instruction.arguments.begin(), instruction.arguments.end(), [](const auto& argument) {
    return argument.kind == Argument::Kind::constant || argument.kind == Argument::Kind::slot;
  });
  if (plain && expected.empty() && instruction.arguments.size() <= kMostDirectArguments) {
    instruction.direct = find_direct_call(name);
  }
  for (auto item : expected) {
    auto entry = item.cast<std::tuple<int32_t, int32_t, std::vector<int64_t>>>();
    instruction.expected.push_back({std::get<0>(entry), std::get<1>(entry), std::get<2>(entry)});
  }
  return instruction;
}

}  // namespace

void bind_programs(py::module_& m) {
  m.def("short_products", &short_products);
#ifdef WATERFLOW_TEST_HOOKS
  m.def("plant_wrong_bit", &plant_wrong_bit, py::arg("name"));
#endif
  py::class_<Program, std::shared_ptr<Program>>(m, "Program")
      .def(py::init<int32_t, int32_t, int32_t>(), py::arg("inputs"), py::arg("fixed"), py::arg("slots"))
      .def(
          "add",
          [](Program& self, const std::string& name, const std::string& overload, const py::list& arguments,
             std::vector<int32_t> results, std::vector<int32_t> drops, const py::list& expected, bool result_is_list,
             bool random, bool view) {
            auto instruction = make_instruction(name, overload, arguments, std::move(results), std::move(drops),
                                                expected, result_is_list, random);
            if (view) {
              self.add_view(std::move(instruction));
            } else {
              self.add(std::move(instruction));
            }
          },
          py::arg("name"), py::arg("overload"), py::arg("arguments"), py::arg("results"), py::arg("drops"),
          py::arg("expected"), py::arg("result_is_list"), py::arg("random"), py::arg("view"))
      .def(
          "add_alias",
          [](Program& self, int32_t source, int32_t result, std::vector<int64_t> sizes, std::vector<int64_t> strides,
             int64_t offset, std::vector<int64_t> expected, std::vector<int32_t> drops) {
            Instruction instruction;
            instruction.alias = Alias{source, std::move(sizes), std::move(strides), offset, std::move(expected)};
            instruction.results = {result};
            instruction.drops = std::move(drops);
            self.add(std::move(instruction));
          },
          py::arg("source"), py::arg("result"), py::arg("sizes"), py::arg("strides"), py::arg("offset"),
          py::arg("expected"), py::arg("drops"))
      .def(
          "add_nothing",
          [](Program& self, std::vector<int32_t> drops) {
            Instruction instruction;
            instruction.drops = std::move(drops);
            self.add(std::move(instruction));
          },
          py::arg("drops"))
      .def("set_outputs", &Program::set_outputs)
      .def("set_written", &Program::set_written)
      .def("set_not_graphed", &Program::set_not_graphed)
      .def("__len__", &Program::size);

  py::class_<Binding, std::shared_ptr<Binding>> binding(m, "Binding");
  py::enum_<Binding::Kind>(binding, "Kind")
      .value("number", Binding::Kind::number)
      .value("flag", Binding::Kind::flag)
      .value("rate", Binding::Kind::rate);
  binding.def(py::init<std::shared_ptr<Program>>())
      .def("set_input", &Binding::set_input)
      .def("set_generator",
           [](Binding& self, std::optional<at::Generator> given) {
             self.set_generator(given.value_or(at::Generator()));
           })
      .def_property_readonly("guards", &Binding::guards)
      .def("watch_form", &Binding::watch_form)
      .def("own_gradient",
           [](Binding& self, const py::object& parameter) {
             TORCH_CHECK(THPVariable_Check(parameter.ptr()), "gradients are those of tensors");
             self.own_gradient(parameter.ptr());
           })
      .def("read",
           [](Binding& self, int32_t slot, const py::dict& dict, const py::object& key, int32_t index,
              Binding::Kind kind,
              bool single) { self.read(slot, dict.ptr(), key.ptr(), index, kind, single ? at::kFloat : at::kDouble); })
      .def("finish_inputs", &Binding::finish_inputs)
      .def("current", &Binding::current)
      .def(
          "run",
          [](Binding& self, std::shared_ptr<GroupPlan> plan, const py::sequence& tensors,
             const std::vector<int32_t>& slots, bool profile) {
            std::vector<std::pair<int32_t, at::Tensor>> batch;
            batch.reserve(slots.size());
            for (size_t i = 0; i < slots.size(); ++i) {
              py::object tensor = tensors[i];
              TORCH_CHECK(THPVariable_Check(tensor.ptr()), "a batch entry is not a tensor");
              batch.emplace_back(slots[i], THPVariable_Unpack(tensor.ptr()));
            }
            return self.run(std::move(plan), std::move(batch), profile);
          },
          py::arg("plan"), py::arg("tensors"), py::arg("slots"), py::arg("profile"));
}

}  // namespace waterflow
