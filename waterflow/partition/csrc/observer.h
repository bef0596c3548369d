// Seeing what the user's own Python frames do while a step is traced: each instruction before it runs, with its
// operands.
//
// Knows nothing of torch. While some thread observes, a frame evaluator of ours (PEP 523) is installed; it hands each
// frame to the evaluator that was there before, and has the instructions of users' frames told: on 3.11 by a trace
// function, on later versions by sys.monitoring. Everything here is called with the GIL.
#pragma once

#include <Python.h>

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace waterflow::observer {

// How operands are taken; `Take` in guards/observer.py says what each means.
enum class Take {
  slots,
  unless_plain,
  globals,
  find_global,
  name_space,
  find_name,
  cell_and_namespace,
  call,
  call_names,
  call_unpacked,
  unless_one_alone,
};

// An instruction that is recorded. Slots count from the frame's first local variable.
struct Instruction {
  PyObject* kind;
  Take take;
  int32_t first_slot, slots;     // in Code::slots
  PyObject* constant;            // nullptr where there is none
  int32_t after, result;         // the code unit that follows, and where the result lies there; -1 where there is none
  int32_t jump, result_of_jump;  // the same for a jump
};

// What is known of a code object. Vectors have an entry for each code unit.
struct Code {
  PyCodeObject* code = nullptr;
  PyObject* plan = nullptr;  // holds what instructions refer to
  bool users = false;
  std::vector<int32_t> instruction;  // -1 where nothing is recorded
  std::vector<int32_t> start;        // the first unit of the instruction that a unit belongs to
  std::vector<int32_t> depth;        // of the stack; -1 where it is not known
  std::vector<char> handler;         // exceptions are handled from here
  std::vector<Instruction> instructions;
  std::vector<int32_t> slots;
  std::vector<int32_t> cells;  // slots of the cells that a frame makes for itself
};

struct Event {
  const Code* code;
  PyObject* kind;
  Take take;
  int32_t offset;  // in bytes; -1 for a frame's entry
  size_t first;    // in Observation::operands
  uint32_t count;
  bool aside, named;  // of calls: a self came apart from the callable; names of arguments are there
  PyObject* result;   // nullptr where there is none
};

// What one thread saw. Holds what it saw until `clear`. (observer.cpp)
struct Observation {
  PyObject* owner = nullptr;    // what Python has of it; its `_plan` says what a code object does
  PyObject* entered = nullptr;  // the kinds that need no plan
  PyObject* cells = nullptr;
  PyObject* check = nullptr;  // called with the events of `checked` kinds before they happen; nullptr for none
  std::vector<PyObject*> checked;
  std::unordered_map<PyCodeObject*, std::unique_ptr<Code>> codes;
  std::vector<Event> events;
  std::vector<PyObject*> operands;
  std::string why_not;  // empty: everything was seen

  void incomplete(const char* why);
  const Code& known(PyThreadState* thread, PyCodeObject* code, PyObject* globals);
  void add(const Code& code, PyObject* kind, Take take, int32_t offset);
  void hold(PyObject* operand);  // of the last event
  bool allowed();                // what `check` says of the last event; false with the exception that it raised
  void clear();
};

// What Python sees of an event; nullptr with an exception set.
PyObject* event_of(const Observation& seen, const Event& event);

// Functions of the module and the type of observations; false with an exception set. (observer_module.cpp)
bool add_to_module(PyObject* module);

// Fill `made` from an OperandPlan of guards/observer.py. False with an exception set. (observer_module.cpp)
bool read_plan(PyObject* plan, Code& made);

// -- observer.cpp

// Begin and end an observation of the calling thread. False with an exception set.
bool start(Observation* observation);
bool stop(Observation* observation);

// sys.monitoring tells of an instruction, on versions that have it. False with an exception set.
bool instruction_event(PyObject* code, int32_t offset);

// -- observer.cpp: sys.monitoring

extern PyObject* cannot_observe;  // an exception, made by add_to_module

// Have and no longer have instructions told, of code objects that are named. Counted. False with an exception set.
bool begin_monitoring();
void end_monitoring();
bool monitor(PyCodeObject* code);

// What sys.monitoring calls; made by add_to_module.
extern PyObject* instruction_callback;

}  // namespace waterflow::observer
