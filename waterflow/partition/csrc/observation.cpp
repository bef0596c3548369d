// What an observation keeps: events, the objects that they hold, and what is known of code objects.
#include "observer.h"

#include <algorithm>

namespace waterflow::observer {

void Observation::incomplete(const char* why) {
  if (why_not.empty()) why_not = why;
}

void Observation::add(const Code& code, PyObject* kind, Take take, int32_t offset) {
  events.push_back({&code, kind, take, offset, operands.size(), 0, false, false, nullptr});
}

void Observation::hold(PyObject* operand) {
  operands.push_back(Py_NewRef(operand != nullptr ? operand : Py_None));
  ++events.back().count;
}

bool Observation::allowed() {
  if (check == nullptr || std::find(checked.begin(), checked.end(), events.back().kind) == checked.end()) return true;
  PyObject* event = event_of(*this, events.back());
  PyObject* said = event != nullptr ? PyObject_CallOneArg(check, event) : nullptr;
  Py_XDECREF(event);
  Py_XDECREF(said);
  return said != nullptr;
}

// The planner runs with tracing off, and what is raised stays raised.
const Code& Observation::known(PyThreadState* thread, PyCodeObject* code, PyObject* globals) {
  const auto found = codes.find(code);
  if (found != codes.end()) return *found->second;
  auto made = std::make_unique<Code>();
  made->code = reinterpret_cast<PyCodeObject*>(Py_NewRef(code));
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyThreadState_EnterTracing(thread);
  PyObject* plan = PyObject_CallMethod(owner, "_plan", "OOi", code, globals, code->co_nlocalsplus);
  PyThreadState_LeaveTracing(thread);
  if (plan == nullptr || (plan != Py_None && !(read_plan(plan, *made) && monitor(code)))) {
    incomplete("whether some code is the user's could not be told");
    if (PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) PyErr_SetInterrupt();
    PyErr_Clear();
  }
  Py_XDECREF(plan);
  PyErr_Restore(type, value, traceback);
  return *codes.emplace(code, std::move(made)).first->second;
}

// What is dropped may run code, which must not find itself in these lists.
void Observation::clear() {
  std::vector<Event> gone;
  std::vector<PyObject*> held;
  std::unordered_map<PyCodeObject*, std::unique_ptr<Code>> known;
  gone.swap(events);
  held.swap(operands);
  known.swap(codes);
  for (Event& event : gone) Py_XDECREF(event.result);
  for (PyObject* operand : held) Py_DECREF(operand);
  for (auto& [code, what] : known) {
    Py_XDECREF(what->plan);
    Py_DECREF(code);
  }
}

}  // namespace waterflow::observer
