// sys.monitoring tells of instructions, on Pythons that have it; 3.11's frames tell by themselves. In C++, for Ctrl-C
// to find no place between the beginning and the end.
#include "observer.h"

namespace waterflow::observer {

PyObject* cannot_observe = nullptr;

#if PY_VERSION_HEX < 0x030C0000

bool begin_monitoring() { return true; }
void end_monitoring() {}
bool monitor(PyCodeObject*) { return true; }

#else
namespace {

constexpr int kPlaces[] = {4, 3, 5, 1, 2, 0};  // those last that are meant for debuggers, coverage and profilers

int observing = 0;  // observations that need the tool's place
int place = -1;
std::vector<PyObject*> watched;  // code objects whose instructions are told

PyObject* monitoring() { return PySys_GetObject("monitoring"); }

// The number that stands for events of instructions; -1 with an exception set.
int instruction_events() {
  PyObject* events = PyObject_GetAttrString(monitoring(), "events");
  PyObject* number = events != nullptr ? PyObject_GetAttrString(events, "INSTRUCTION") : nullptr;
  const int found = number != nullptr ? static_cast<int>(PyLong_AsLong(number)) : -1;
  Py_XDECREF(events);
  Py_XDECREF(number);
  return found;
}

bool done(PyObject* result) {
  Py_XDECREF(result);
  return result != nullptr;
}

bool is_free(int number) {
  PyObject* tool = PyObject_CallMethod(monitoring(), "get_tool", "i", number);
  const bool free = tool == Py_None;
  if (tool == nullptr) PyErr_Clear();
  Py_XDECREF(tool);
  return free;
}

bool register_callback(PyObject* callback) {
  const int events = instruction_events();
  return events >= 0 && done(PyObject_CallMethod(monitoring(), "register_callback", "iiO", place, events, callback));
}

}  // namespace

bool begin_monitoring() {
  if (observing == 0) {
    place = -1;
    for (int number : kPlaces) {
      if (place < 0 && is_free(number)) place = number;
    }
    if (place < 0) {
      PyErr_SetString(cannot_observe, "all places for tools that monitor Python's code are taken (sys.monitoring)");
      return false;
    }
    if (!done(PyObject_CallMethod(monitoring(), "use_tool_id", "is", place, "waterflow"))) return false;
    if (!register_callback(instruction_callback)) {
      done(PyObject_CallMethod(monitoring(), "free_tool_id", "i", place));
      return false;
    }
  }
  ++observing;
  return true;
}

void end_monitoring() {
  if (--observing > 0) return;
  for (PyObject* code : watched) {
    if (!done(PyObject_CallMethod(monitoring(), "set_local_events", "iOi", place, code, 0))) PyErr_Clear();
    Py_DECREF(code);
  }
  watched.clear();
  if (!register_callback(Py_None)) PyErr_Clear();
  if (!done(PyObject_CallMethod(monitoring(), "free_tool_id", "i", place))) PyErr_Clear();
}

bool monitor(PyCodeObject* code) {
  const int events = instruction_events();
  if (events < 0) return false;
  if (!done(PyObject_CallMethod(monitoring(), "set_local_events", "iOi", place, code, events))) return false;
  watched.push_back(Py_NewRef(reinterpret_cast<PyObject*>(code)));
  return true;
}

#endif

}  // namespace waterflow::observer
