#include "waterflow/partition/csrc/observer.h"

#include <algorithm>

#define Py_BUILD_CORE 1

#if PY_VERSION_HEX >= 0x030E0000 || defined(Py_GIL_DISABLED)
#error "waterflow needs CPython 3.11, 3.12 or 3.13 with its global lock: frames of others cannot be observed"
#endif
#include <frameobject.h>
#include <internal/pycore_frame.h>

namespace waterflow::observer {

namespace {

constexpr size_t kMostEvents = 4'000'000;  // some 400 MB

// A user's frame that runs. On the C stack, as the frame's evaluation is.
struct Running {
  const Code* code;
  _PyInterpreterFrame* frame;
  Running* outer;
  int64_t pending = -1;  // the event whose result is to come
  const Instruction* pending_instruction = nullptr;
  bool fresh = true;                 // none of its instructions was seen yet
  PyFrameObject* flagged = nullptr;  // 3.11: whose flags for tracing we set
  char lines = 0, opcodes = 0;       // those flags before
};

struct Tracing {
  Py_tracefunc function = nullptr;
  PyObject* object = nullptr;
};

struct Thread {
  Observation* observation = nullptr;
  Running* running = nullptr;
  bool in_users = false;  // the innermost frame is a user's
  Tracing outer;          // 3.11: what traces outside of users' frames, while we are in one
};

thread_local Thread here;

int observing = 0;  // threads that do
_PyFrameEvalFunction previous = nullptr;
_PyFrameEvalFunction displaced = nullptr;  // who took our place, and may hand frames back to us

PyObject* evaluate(PyThreadState* thread, _PyInterpreterFrame* frame, int thrown);

// -- frames of the versions

#if PY_VERSION_HEX >= 0x030D0000
PyCodeObject* code_of(_PyInterpreterFrame* frame) { return reinterpret_cast<PyCodeObject*>(frame->f_executable); }
PyObject* function_of(_PyInterpreterFrame* frame) { return frame->f_funcobj; }
_PyInterpreterFrame* current_frame(PyThreadState* thread) { return thread->current_frame; }
#elif PY_VERSION_HEX >= 0x030C0000
PyCodeObject* code_of(_PyInterpreterFrame* frame) { return frame->f_code; }
PyObject* function_of(_PyInterpreterFrame* frame) { return frame->f_funcobj; }
_PyInterpreterFrame* current_frame(PyThreadState* thread) { return thread->cframe->current_frame; }
#else
PyCodeObject* code_of(_PyInterpreterFrame* frame) { return frame->f_code; }
PyObject* function_of(_PyInterpreterFrame* frame) { return reinterpret_cast<PyObject*>(frame->f_func); }
#endif

// -- operands

bool is_plain(PyObject* value) {
  PyTypeObject* type = Py_TYPE(value);
  return type == &PyLong_Type || type == &PyFloat_Type || type == &PyUnicode_Type || type == &PyBool_Type ||
         value == Py_None || type == &PyBytes_Type || type == &PyComplex_Type;
}

// The first dict that has the name. A namespace with a way of its own to look up counts as having it.
PyObject* who_has(PyObject* space, _PyInterpreterFrame* frame, PyObject* name) {
  for (PyObject* place : {space, frame->f_globals}) {
    if (place == nullptr) continue;
    if (!PyDict_CheckExact(place)) return place;
    if (PyDict_GetItemWithError(place, name) != nullptr) return place;
    PyErr_Clear();
  }
  return frame->f_builtins;
}

// An object that is itself in every process.
bool is_alone(PyObject* value) {
  return value == Py_None || PyBool_Check(value) || value == Py_Ellipsis || PyType_Check(value);
}

void take_call(Observation& seen, PyObject** locals, const int32_t* slots, int count) {
  PyObject* one = locals[slots[0]];
  PyObject* other = locals[slots[1]];
  PyObject* callable = one != nullptr ? one : other;
  PyObject* self = one != nullptr ? other : nullptr;
  Event& event = seen.events.back();
  if (self == nullptr && PyMethod_Check(callable)) {
    self = PyMethod_GET_SELF(callable);
    callable = PyMethod_GET_FUNCTION(callable);
  }
  seen.hold(callable);
  if (self != nullptr) {
    event.aside = true;
    seen.hold(self);
  }
  for (int i = 2; i < count; ++i) seen.hold(locals[slots[i]]);
}

// Whether there is something to record.
bool matters(const Instruction& at, PyObject** locals, const int32_t* slots) {
  if (at.take == Take::unless_one_alone) return !is_alone(locals[slots[0]]) && !is_alone(locals[slots[1]]);
  if (at.take != Take::unless_plain) return true;
  for (int i = 0; i < at.slots; ++i) {
    if (locals[slots[i]] != nullptr && !is_plain(locals[slots[i]])) return true;
  }
  return false;
}

void take(Observation& seen, const Instruction& at, _PyInterpreterFrame* frame, const int32_t* slots) {
  PyObject** locals = frame->localsplus;
  PyObject* space = frame->f_locals != nullptr ? frame->f_locals : frame->f_globals;
  int from = 0;
  switch (at.take) {
    case Take::call:
    case Take::call_names:
    case Take::call_unpacked:
      take_call(seen, locals, slots, at.slots);
      seen.events.back().named = at.constant != nullptr || at.take == Take::call_names;
      if (at.constant != nullptr) seen.hold(at.constant);
      return;
    case Take::globals:
      seen.hold(frame->f_globals);
      break;
    case Take::find_global:
      seen.hold(who_has(nullptr, frame, at.constant));
      break;
    case Take::name_space:
      seen.hold(space);
      break;
    case Take::find_name:
      seen.hold(who_has(at.slots > 0 ? locals[slots[0]] : space, frame, at.constant));
      from = 1;
      break;
    default:
      if (at.slots > 0) seen.hold(locals[slots[0]]);
      from = 1;
  }
  if (at.constant != nullptr) seen.hold(at.constant);
  for (int i = from; i < at.slots; ++i) seen.hold(locals[slots[i]]);
  if (at.take == Take::cell_and_namespace) seen.hold(space);
}

// -- instructions

void check_evaluator(Observation& seen, PyThreadState* thread) {
  if (_PyInterpreterState_GetEvalFrameFunc(thread->interp) != evaluate) {
    seen.incomplete("something else evaluates Python's frames meanwhile");
  }
}

// The result of the last event's instruction lies on the stack now, unless it raised.
void settle(Observation& seen, Running& running, int unit) {
  const Instruction& at = *running.pending_instruction;
  const Code& code = *running.code;
  const int start = code.start[unit];
  const int slot = start == at.after ? at.result : start == at.jump ? at.result_of_jump : -1;
  if (slot >= 0 && !code.handler[start]) {
    PyObject** locals = running.frame->localsplus;
    PyObject* result = locals[slot] != nullptr ? locals[slot] : locals[slot + 1];  // NULL, and what is called
    seen.events[running.pending].result = Py_XNewRef(result);
  }
  running.pending = -1;
}

void begin(Observation& seen, Running& running) {
  running.fresh = false;
  if (running.code->cells.empty()) return;
  seen.add(*running.code, seen.cells, Take::slots, -1);
  for (int32_t slot : running.code->cells) seen.hold(running.frame->localsplus[slot]);
}

// The frame is about to run what stands at `unit`. False with an exception where that is not allowed.
bool instruction(Observation& seen, PyThreadState* thread, Running& running, int unit) {
  const Code& code = *running.code;
  check_evaluator(seen, thread);
  if (running.pending >= 0) settle(seen, running, unit);
  if (running.fresh) begin(seen, running);
#if PY_VERSION_HEX < 0x030C0000
  const int variables = code.code->co_nlocalsplus;
  if (code.depth[unit] < 0 || running.frame->stacktop != variables + code.depth[unit]) {
    seen.incomplete("the depth of a frame's stack is not what its code says");
    return true;
  }
#endif
  const int32_t number = code.instruction[unit];
  if (number < 0) return true;
  const Instruction& at = code.instructions[number];
  const int32_t* slots = code.slots.data() + at.first_slot;
  if (!matters(at, running.frame->localsplus, slots)) return true;
  if (seen.events.size() >= kMostEvents) {
    seen.incomplete("the step's Python code runs for too long");
    return true;
  }
  seen.add(code, at.kind, at.take, 2 * unit);
  take(seen, at, running.frame, slots);
  if (at.after >= 0) {
    running.pending = static_cast<int64_t>(seen.events.size()) - 1;
    running.pending_instruction = &at;
  }
  return seen.allowed();
}

// -- whose turn it is to trace (3.11)

#if PY_VERSION_HEX < 0x030C0000
int trace(PyObject*, PyFrameObject* object, int what, PyObject* argument);

Tracing tracing_of(PyThreadState* thread) { return {thread->c_tracefunc, thread->c_traceobj}; }

void set_tracing(PyThreadState* thread, Tracing tracing) {
  thread->c_tracefunc = tracing.function;
  thread->c_traceobj = tracing.object;
  const bool on = thread->tracing == 0 && (thread->c_tracefunc != nullptr || thread->c_profilefunc != nullptr);
  thread->cframe->use_tracing = on ? 255 : 0;
}

// From the outside into a user's frame, and back.
void go_in(PyThreadState* thread) {
  if (!here.in_users) here.outer = tracing_of(thread);
  here.in_users = true;
  set_tracing(thread, {trace, nullptr});
}

void go_out(PyThreadState* thread, Observation& seen) {
  if (thread->c_tracefunc != trace) {
    seen.incomplete("the step sets a trace function");
    Py_XDECREF(here.outer.object);
    here.outer = tracing_of(thread);
  }
  here.in_users = false;
  set_tracing(thread, here.outer);
  here.outer = {};
}

void flag(Running& running, PyFrameObject* object) {
  if (running.flagged == nullptr) {
    running.flagged = reinterpret_cast<PyFrameObject*>(Py_NewRef(object));
    running.lines = object->f_trace_lines;
    running.opcodes = object->f_trace_opcodes;
  }
  object->f_trace_opcodes = 1;
  if (here.outer.function == nullptr) object->f_trace_lines = 0;
}

void unflag(Running& running) {
  if (running.flagged == nullptr) return;
  running.flagged->f_trace_lines = running.lines;
  running.flagged->f_trace_opcodes = running.opcodes;
  Py_DECREF(running.flagged);
}

// A debugger's or coverage's function goes on seeing what it saw before.
int forward(PyThreadState* thread, PyFrameObject* object, int what, PyObject* argument) {
  if (here.outer.function == nullptr) return 0;
  thread->c_tracefunc = here.outer.function;
  thread->c_traceobj = here.outer.object;
  const int done = here.outer.function(here.outer.object, object, what, argument);
  here.outer = tracing_of(thread);
  thread->c_tracefunc = trace;
  thread->c_traceobj = nullptr;
  return done;
}

int trace(PyObject*, PyFrameObject* object, int what, PyObject* argument) {
  PyThreadState* thread = PyThreadState_Get();
  Running* running = here.running;
  if (here.observation == nullptr || running == nullptr || object->f_frame != running->frame) return 0;
  Observation& seen = *here.observation;
  if (what == PyTrace_OPCODE) {
    if (!instruction(seen, thread, *running, _PyInterpreterFrame_LASTI(running->frame))) return -1;
    return running->opcodes ? forward(thread, object, what, argument) : 0;
  }
  if (what == PyTrace_EXCEPTION) running->pending = -1;
  if (what == PyTrace_CALL || what == PyTrace_EXCEPTION) flag(*running, object);
  return forward(thread, object, what, argument);
}
#endif

// -- frames

PyObject* evaluate_users(PyThreadState* thread, _PyInterpreterFrame* frame, int thrown, Observation& seen,
                         const Code& code) {
  seen.add(code, seen.entered, Take::slots, -1);
  seen.hold(function_of(frame));
  Running running{&code, frame, here.running};
  here.running = &running;
#if PY_VERSION_HEX < 0x030C0000
  const bool was_in = here.in_users;
  go_in(thread);
  PyObject* result = previous(thread, frame, thrown);
  unflag(running);
  here.running = running.outer;
  go_out(thread, seen);
  if (was_in) go_in(thread);
#else
  PyObject* result = previous(thread, frame, thrown);
  here.running = running.outer;
#endif
  return result;
}

PyObject* evaluate(PyThreadState* thread, _PyInterpreterFrame* frame, int thrown) {
  Observation* seen = here.observation;
  if (seen == nullptr || thread->tracing > 0) return previous(thread, frame, thrown);
  check_evaluator(*seen, thread);
  const Code& code = seen->known(thread, code_of(frame), frame->f_globals);
  if (code.users) return evaluate_users(thread, frame, thrown, *seen, code);
#if PY_VERSION_HEX < 0x030C0000
  if (here.in_users) {
    go_out(thread, *seen);
    PyObject* result = previous(thread, frame, thrown);
    go_in(thread);
    return result;
  }
#endif
  return previous(thread, frame, thrown);
}

}  // namespace

// -- the beginning and the end

bool start(Observation* observation) {
  if (here.observation != nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "this thread is being observed already");
    return false;
  }
  PyInterpreterState* interpreter = PyInterpreterState_Get();
  const _PyFrameEvalFunction now = _PyInterpreterState_GetEvalFrameFunc(interpreter);
  if (now != evaluate && (observing > 0 || now == displaced)) {
    PyErr_SetString(cannot_observe, "something else evaluates Python's frames, and may hand them to the observer");
    return false;
  }
  if (!begin_monitoring()) return false;
  if (now != evaluate) {
    previous = now;
    _PyInterpreterState_SetEvalFrameFunc(interpreter, evaluate);
  }
  ++observing;
  here.observation = observation;
  return true;
}

bool stop(Observation* observation) {
  if (here.observation != observation || here.running != nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "an observation ends on its own thread, outside of the frames that it sees");
    return false;
  }
  here.observation = nullptr;
  end_monitoring();
  PyInterpreterState* interpreter = PyInterpreterState_Get();
  const _PyFrameEvalFunction now = _PyInterpreterState_GetEvalFrameFunc(interpreter);
  if (now != evaluate) {
    observation->incomplete("something else evaluates Python's frames since");
    if (now != previous) displaced = now;
  }
  if (--observing == 0 && now == evaluate) _PyInterpreterState_SetEvalFrameFunc(interpreter, previous);
  return true;
}

bool instruction_event([[maybe_unused]] PyObject* code, [[maybe_unused]] int32_t offset) {
#if PY_VERSION_HEX >= 0x030C0000
  Running* running = here.running;
  if (here.observation == nullptr || running == nullptr) return true;
  PyThreadState* thread = PyThreadState_Get();
  if (current_frame(thread) != running->frame || reinterpret_cast<PyObject*>(running->code->code) != code) return true;
  return instruction(*here.observation, thread, *running, offset / 2);
#else
  return true;
#endif
}

}  // namespace waterflow::observer

// What an observation keeps: events, the objects that they hold, and what is known of code objects.

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

// sys.monitoring tells of instructions, on Pythons that have it; 3.11's frames tell by themselves. In C++, for Ctrl-C
// to find no place between the beginning and the end.

namespace waterflow::observer {

PyObject* cannot_observe = nullptr;

#if PY_VERSION_HEX < 0x030C0000

bool begin_monitoring() { return true; }
void end_monitoring() {}
bool monitor(PyCodeObject*) { return true; }

#else
namespace {

constexpr int kPlaces[] = {4, 3, 5, 1, 2, 0};  // those last that are meant for debuggers, coverage and profilers

int observations = 0;  // those that need the tool's place
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
  if (observations == 0) {
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
  ++observations;
  return true;
}

void end_monitoring() {
  if (--observations > 0) return;
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
