// What Python sees of the observer, without torch and pybind11: it can be built alone.
#include "waterflow/partition/csrc/observer.h"

namespace waterflow::observer {
namespace {

struct Object {
  PyObject_HEAD Observation* seen;
};

Observation& seen_of(PyObject* self) { return *reinterpret_cast<Object*>(self)->seen; }

PyTypeObject* event_type = nullptr;

PyStructSequence_Field event_fields[] = {
    {"kind", "a Kind"},
    {"operands", "a tuple; what they are depends on the kind"},
    {"result", "what the instruction made; MISSING where it made nothing, or raised"},
    {"code", "the code object of the frame"},
    {"offset", "of the instruction in the code, in bytes; -1 for a frame as a whole"},
    {nullptr, nullptr},
};
PyStructSequence_Desc event_description = {"waterflow._C.ObservedEvent", "Something that a user's frame did.",
                                           event_fields, 5};

// -- plans

bool read_numbers(PyObject* list, std::vector<int32_t>& made) {
  PyObject* items = PySequence_Fast(list, "a list of numbers");
  if (items == nullptr) return false;
  made.clear();
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items); ++i) {
    made.push_back(static_cast<int32_t>(PyLong_AsLong(PySequence_Fast_GET_ITEM(items, i))));
  }
  Py_DECREF(items);
  return !PyErr_Occurred();
}

bool read_step(PyObject* step, Code& made) {
  int unit, take, after, result, jump, result_of_jump;
  PyObject *kind, *slots, *constant;
  if (!PyArg_ParseTuple(step, "iOiOOiiii", &unit, &kind, &take, &slots, &constant, &after, &result, &jump,
                        &result_of_jump)) {
    return false;
  }
  std::vector<int32_t> numbers;
  if (!read_numbers(slots, numbers)) return false;
  made.instruction.at(unit) = static_cast<int32_t>(made.instructions.size());
  made.instructions.push_back({kind, static_cast<Take>(take), static_cast<int32_t>(made.slots.size()),
                               static_cast<int32_t>(numbers.size()), constant == Py_None ? nullptr : constant, after,
                               result, jump, result_of_jump});
  made.slots.insert(made.slots.end(), numbers.begin(), numbers.end());
  return true;
}

// -- events

PyObject* part(const Observation& seen, size_t first, size_t count) {
  PyObject* made = PyTuple_New(static_cast<Py_ssize_t>(count));
  if (made == nullptr) return nullptr;
  for (size_t i = 0; i < count; ++i) {
    PyTuple_SET_ITEM(made, static_cast<Py_ssize_t>(i), Py_NewRef(seen.operands[first + i]));
  }
  return made;
}

// (callable, arguments, names), where self is the first argument; names are the last operand, or there are none.
PyObject* call_operands(const Observation& seen, const Event& event) {
  const size_t last = event.first + event.count - 1;
  PyObject* arguments = part(seen, event.first + 1, event.count - 1 - (event.named ? 1 : 0));
  PyObject* names = event.named ? Py_NewRef(seen.operands[last]) : PyTuple_New(0);
  return Py_BuildValue("(ONN)", seen.operands[event.first], arguments, names);
}

// (callable, arguments, keyword arguments or None), and a self that came apart.
PyObject* unpacked_operands(const Observation& seen, const Event& event) {
  const PyObject* const* all = seen.operands.data() + event.first;
  const size_t from = event.aside ? 2 : 1;
  PyObject* arguments = const_cast<PyObject*>(all[from]);
  PyObject* keywords = from + 1 < event.count ? const_cast<PyObject*>(all[from + 1]) : Py_None;
  PyObject* callable = const_cast<PyObject*>(all[0]);
  if (!event.aside) return Py_BuildValue("(OOO)", callable, arguments, keywords);
  return Py_BuildValue("(OOOO)", callable, arguments, keywords, all[1]);
}

PyObject* operands_of(const Observation& seen, const Event& event) {
  if (event.take == Take::call || event.take == Take::call_names) return call_operands(seen, event);
  if (event.take == Take::call_unpacked) return unpacked_operands(seen, event);
  return part(seen, event.first, event.count);
}

PyObject* missing = nullptr;

PyObject* seen_event(const Observation& seen, const Event& event) {
  PyObject* operands = operands_of(seen, event);
  PyObject* made = operands != nullptr ? PyStructSequence_New(event_type) : nullptr;
  if (made == nullptr) {
    Py_XDECREF(operands);
    return nullptr;
  }
  PyStructSequence_SetItem(made, 0, Py_NewRef(event.kind));
  PyStructSequence_SetItem(made, 1, operands);
  PyStructSequence_SetItem(made, 2, Py_NewRef(event.result != nullptr ? event.result : missing));
  PyStructSequence_SetItem(made, 3, Py_NewRef(reinterpret_cast<PyObject*>(event.code->code)));
  PyStructSequence_SetItem(made, 4, PyLong_FromLong(event.offset));
  PyObject_GC_Track(made);
  return made;
}

// -- the type

PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject *entered, *cells, *check, *checked;
  if (!PyArg_ParseTuple(arguments, "OOOO!", &entered, &cells, &check, &PyTuple_Type, &checked)) return nullptr;
  Object* self = reinterpret_cast<Object*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->seen = new Observation;
  self->seen->owner = reinterpret_cast<PyObject*>(self);
  self->seen->entered = Py_NewRef(entered);
  self->seen->cells = Py_NewRef(cells);
  self->seen->check = check != Py_None ? Py_NewRef(check) : nullptr;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(checked); ++i) {
    self->seen->checked.push_back(Py_NewRef(PyTuple_GET_ITEM(checked, i)));
  }
  return reinterpret_cast<PyObject*>(self);
}

int clear(PyObject* self) {
  Observation& seen = seen_of(self);
  seen.clear();
  Py_CLEAR(seen.check);
  Py_CLEAR(seen.entered);
  Py_CLEAR(seen.cells);
  for (PyObject*& kind : seen.checked) Py_CLEAR(kind);
  return 0;
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  if (reinterpret_cast<Object*>(self)->seen == nullptr) return 0;
  const Observation& seen = seen_of(self);
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(seen.check);
  Py_VISIT(seen.entered);
  Py_VISIT(seen.cells);
  for (PyObject* kind : seen.checked) Py_VISIT(kind);
  for (const Event& event : seen.events) Py_VISIT(event.result);
  for (PyObject* operand : seen.operands) Py_VISIT(operand);
  return 0;
}

void free_object(PyObject* self) {
  PyObject_GC_UnTrack(self);
  clear(self);
  delete reinterpret_cast<Object*>(self)->seen;
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// In C++, for Ctrl-C to find no place between the beginning and the end of a with statement.
PyObject* enter(PyObject* self, PyObject*) {
  if (!start(&seen_of(self))) return nullptr;
  Py_INCREF(self);  // until it ends
  return Py_NewRef(self);
}

PyObject* leave(PyObject* self, PyObject*) {
  if (!stop(&seen_of(self))) return nullptr;
  PyObject* ended = PyObject_CallMethod(self, "_end", nullptr);
  Py_DECREF(self);
  if (ended == nullptr) return nullptr;
  Py_DECREF(ended);
  Py_RETURN_NONE;
}

PyObject* take_events(PyObject* self, PyObject*) {
  Observation& seen = seen_of(self);
  PyObject* made = PyList_New(static_cast<Py_ssize_t>(seen.events.size()));
  if (made == nullptr) return nullptr;
  for (size_t i = 0; i < seen.events.size(); ++i) {
    PyObject* event = seen_event(seen, seen.events[i]);
    if (event == nullptr) {
      Py_DECREF(made);
      return nullptr;
    }
    PyList_SET_ITEM(made, static_cast<Py_ssize_t>(i), event);
  }
  seen.clear();
  return made;
}

PyObject* why_not_of(PyObject* self, void*) { return PyUnicode_FromString(seen_of(self).why_not.c_str()); }

PyMethodDef methods[] = {
    {"__enter__", enter, METH_NOARGS, "Observe the calling thread."},
    {"__exit__", leave, METH_VARARGS, "End that."},
    {"take_events", take_events, METH_NOARGS, "A list of what was seen, in order, which is then the caller's."},
    {nullptr, nullptr, 0, nullptr},
};
PyGetSetDef properties[] = {
    {"why_not", why_not_of, nullptr, "Why not everything was seen; empty where it was.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};
PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(free_object)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {0, nullptr},
};
PyType_Spec type_spec = {"waterflow._C.Observation", sizeof(Object), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, slots};

PyObject* told_of_instruction(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  const bool allowed = count != 2 || instruction_event(arguments[0], static_cast<int32_t>(PyLong_AsLong(arguments[1])));
  return allowed ? Py_NewRef(Py_None) : nullptr;
}

PyMethodDef callback = {"observed_instruction",
                        reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(told_of_instruction)), METH_FASTCALL,
                        "The callback of sys.monitoring for instructions."};

}  // namespace

PyObject* event_of(const Observation& seen, const Event& event) { return seen_event(seen, event); }

bool read_plan(PyObject* plan, Code& made) {
  PyObject *steps, *starts, *depths, *handlers, *cells;
  if (!PyArg_ParseTuple(plan, "OOOOO", &steps, &starts, &depths, &handlers, &cells)) return false;
  std::vector<int32_t> caught;
  if (!read_numbers(starts, made.start) || !read_numbers(depths, made.depth) || !read_numbers(handlers, caught) ||
      !read_numbers(cells, made.cells)) {
    return false;
  }
  made.instruction.assign(made.start.size(), -1);
  made.handler.assign(made.start.size(), 0);
  for (int32_t unit : caught) made.handler.at(unit) = 1;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(steps); ++i) {
    if (!read_step(PyTuple_GET_ITEM(steps, i), made)) return false;
  }
  made.plan = Py_NewRef(plan);
  made.users = true;
  return true;
}

PyObject* instruction_callback = nullptr;

bool add_to_module(PyObject* module) {
  if (event_type == nullptr) {
    event_type = PyStructSequence_NewType(&event_description);
    missing = PyObject_CallNoArgs(reinterpret_cast<PyObject*>(&PyBaseObject_Type));
    instruction_callback = PyCFunction_New(&callback, nullptr);
    cannot_observe = PyErr_NewExceptionWithDoc(
        "waterflow._C.CannotObserve", "No way to see what a step does: by this Python, or by what else watches it.",
        PyExc_NotImplementedError, nullptr);
  }
  PyObject* type = PyType_FromSpec(&type_spec);
  if (event_type == nullptr || missing == nullptr || type == nullptr || instruction_callback == nullptr ||
      cannot_observe == nullptr) {
    return false;
  }
  return PyModule_AddObjectRef(module, "Observation", type) == 0 &&
         PyModule_AddObjectRef(module, "ObservedEvent", reinterpret_cast<PyObject*>(event_type)) == 0 &&
         PyModule_AddObjectRef(module, "MISSING", missing) == 0 &&
         PyModule_AddObjectRef(module, "CannotObserve", cannot_observe) == 0;
}

}  // namespace waterflow::observer
