// What Python sees of programs, and of their bindings to a job's tensors.

#include <pybind11/stl.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "waterflow/executor/csrc/kernels/small_gemm.h"
#include "waterflow/executor/csrc/program/batch_form.h"
#include "waterflow/executor/csrc/program/bound_program.h"
#include "waterflow/executor/csrc/program/collected.h"
#include "waterflow/executor/csrc/program/guards.h"
#include "waterflow/executor/csrc/program/program.h"
#include "waterflow/executor/csrc/program/random_state.h"
#include "waterflow/executor/csrc/program/state_bytes.h"

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
      TORCH_CHECK(!THPVariable_Check(entry[1].ptr()), "a program holds no tensors; they are its inputs");
      const auto& type = schema.arguments()[i].type();
      if (type->isSubtypeOf(*c10::TensorType::get()) && !entry[1].is_none()) {
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

PyObject* checked(const py::object& tensor) {
  TORCH_CHECK_TYPE(THPVariable_Check(tensor.ptr()), "not a tensor");
  return tensor.ptr();
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

  py::class_<Binding> binding(m, "Binding", collected<Binding>());
  py::enum_<Binding::Kind>(binding, "Kind")
      .value("number", Binding::Kind::number)
      .value("flag", Binding::Kind::flag)
      .value("rate", Binding::Kind::rate);
  binding.def(py::init<std::shared_ptr<Program>>())
      .def(
          "set_input",
          [](Binding& self, int32_t slot, const py::object& tensor, bool may_resize) {
            self.set_input(slot, checked(tensor), may_resize);
          },
          py::arg("slot"), py::arg("tensor"), py::arg("may_resize") = false)
      .def("set_generator",
           [](Binding& self, std::optional<at::Generator> given) {
             self.set_generator(given.value_or(at::Generator()));
           })
      .def_property_readonly("guards",
                             [](const Binding& self) { return py::reinterpret_borrow<py::object>(self.guards()); })
      .def("watch_form", [](Binding& self, const py::object& tensor) { self.watch_form(checked(tensor)); })
      .def("own_gradient", [](Binding& self, const py::object& parameter) { self.own_gradient(checked(parameter)); })
      .def("read", [](Binding& self, int32_t slot, const py::dict& dict, const py::object& key, int32_t index,
                      Binding::Kind kind) { self.read(slot, dict.ptr(), key.ptr(), index, kind); })
      .def("finish_inputs", &Binding::finish_inputs)
      .def("current", &Binding::current)
      .def(
          "run",
          [](Binding& self, std::shared_ptr<GroupPlan> plan, const py::sequence& tensors,
             const std::vector<int32_t>& slots, bool profile) {
            std::vector<std::pair<int32_t, at::Tensor>> batch;
            batch.reserve(slots.size());
            for (size_t i = 0; i < slots.size(); ++i) {
              batch.emplace_back(slots[i], THPVariable_Unpack(checked(tensors[i])));
            }
            return self.run(std::move(plan), std::move(batch), profile);
          },
          py::arg("plan"), py::arg("tensors"), py::arg("slots"), py::arg("profile"));
}

// Python's view of guards, of the settings around a step, and of what a batch's tensors carry.

namespace {

PyTypeObject* type_of(const py::type& type) { return reinterpret_cast<PyTypeObject*>(type.ptr()); }

py::object form_of(PyObject* batch) {
  if (!PyTuple_CheckExact(batch)) return py::none();
  PyObject** first = &PyTuple_GET_ITEM(batch, 0);
  std::string key;
  const bool plain = add_form({first, first + PyTuple_GET_SIZE(batch)}, true, key);
  return plain ? py::object(py::bytes(key)) : py::none();
}

}  // namespace

void bind_guards(py::module_& m) {
  py::class_<Guards>(m, "Guards", collected<Guards>())
      .def(py::init<>(), "Notes what places say; ``current()`` tells whether all of them still say it.")
      .def("entry", [](Guards& self, const py::dict& dict, const py::str& name) { self.entry(dict.ptr(), name.ptr()); })
      .def("dict", [](Guards& self, const py::dict& dict) { self.dict(dict.ptr()); })
      .def("items", [](Guards& self, const py::object& container,
                       const py::type& base) { self.items(container.ptr(), type_of(base)); })
      .def("cell",
           [](Guards& self, const py::object& cell) {
             TORCH_CHECK_TYPE(PyCell_Check(cell.ptr()), "not a cell");
             self.cell(cell.ptr());
           })
      .def("member", [](Guards& self, const py::object& object,
                        const py::object& descriptor) { self.member(object.ptr(), descriptor.ptr()); })
      .def("object", [](Guards& self, const py::object& object) { self.object(object.ptr()); })
      .def("function",
           [](Guards& self, const py::object& function) {
             TORCH_CHECK_TYPE(PyFunction_Check(function.ptr()), "not a function");
             self.function(function.ptr());
           })
      .def("cls", [](Guards& self, const py::type& cls) { self.cls(cls.ptr()); })
      .def("bytes", [](Guards& self, const py::object& object,
                       const py::type& base) { self.bytes(object.ptr(), type_of(base)); })
      .def("truth",
           [](Guards& self, const py::dict& dict, const py::object& key) { self.truth(dict.ptr(), key.ptr()); })
      .def("hooks", [](Guards& self, const py::object& parameter) { self.hooks(checked(parameter)); })
      .def("setting", [](Guards& self, const py::function& function) { self.setting(function.ptr()); })
      .def("current", &Guards::current);

  m.def(
      "attributes_of",
      [](const py::object& object) {
        PyObject* attributes = attributes_of(object.ptr());
        return attributes == nullptr ? py::object(py::none()) : py::reinterpret_borrow<py::object>(attributes);
      },
      "An object's own attributes, as no code of its class can show them; None where it has none, or none yet.");
  m.def(
      "carries_more",
      [](const py::sequence& tensors) {
        return std::any_of(tensors.begin(), tensors.end(),
                           [](const auto& one) { return THPVariable_Check(one.ptr()) && carries_more(one.ptr()); });
      },
      "Whether one of these tensors requires gradients, has one, or has attributes of its own.");
  m.def(
      "form_of", [](const py::object& batch) { return form_of(batch.ptr()); },
      "A key of the sizes, strides, types and devices of a tuple of plain tensors, which are nothing but memory, "
      "beside the "
      "types of numbers and text among them; None for any other batch.");
  m.def(
      "ambient", [](const std::string& device_type) { return py::bytes(ambient(c10::Device(device_type).type())); },
      "Settings of the process and the calling thread that a step's code can tell apart, all in one key.");
  using unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<StateBytes>(m, "StateBytes",
                         "The sizes of some tensors and the memory that they lie on: each byte once, and no byte of "
                         "anybody else's.",
                         collected<StateBytes>())
      .def(py::init<const py::sequence&>())
      .def_property_readonly("bytes", &StateBytes::bytes, "Bytes of a copy.")
      .def("keep", &StateBytes::keep, unlocked(), "Copy what lies there now.")
      .def("put", &StateBytes::put, unlocked(), "Bring the copy back, and the sizes; what is as it was is not written.")
      .def("is_as", &StateBytes::is_as, unlocked(), "Whether sizes and each bit are as they were.")
      .def("kept", &StateBytes::kept, "One of the tensors, as it was when it was copied.")
      .def("checksum", &StateBytes::checksum, unlocked(), "A number of what lies there now.");
  m.def("denormals_here", &denormals_here, "The calling thread's bits for denormal numbers.");
  m.def("modes_here", &modes_here, "How many function and dispatch modes the calling thread is in.");
}

// Python's view of a thread's own random generators.

void bind_generators(py::module_& m) {
  py::class_<ThreadGenerators>(m, "ThreadGenerators")
      .def(py::init<std::vector<at::Generator>>())
      .def("__enter__", &ThreadGenerators::enter)
      .def("__exit__", [](ThreadGenerators& self, const py::args&) { self.exit(); });

  // The calling thread's generator for a kind of device, "cpu" or "cuda:0"; None where it draws from the process's.
  m.def("thread_generator", [](const std::string& device) -> std::optional<at::Generator> {
    const auto* own = ThreadGenerators::of(c10::Device(device));
    return own != nullptr ? std::optional(*own) : std::nullopt;
  });

  // Makes a Python object of a subclass of torch.Generator another name for a generator.
  m.def("alias_generator", [](const py::object& name, const at::Generator& generator) {
    TORCH_CHECK_TYPE(THPGenerator_Check(name.ptr()), "only a torch.Generator can be another name for a generator");
    reinterpret_cast<THPGenerator*>(name.ptr())->cdata = generator;
  });
}

}  // namespace waterflow
