// Checks that a captured step still holds: settings of the process and the calling thread, and objects that the step
// was made from. Also sets the calling thread's denormal mode, which is such a setting.
#pragma once

#include <Python.h>
#include <c10/core/DeviceType.h>

#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "waterflow/executor/csrc/program/held.h"

namespace waterflow {

// One key of all settings of the process and the calling thread that change what a step computes, or what its code
// sees; two bytes each. A step that is traced under equal keys records the same.
std::string ambient(c10::DeviceType kind);

// Function modes, dispatch modes, and hooks for saved tensors that the calling thread is in.
int modes_here();

// Whether a thread takes denormal numbers for zero, and makes none: torch.set_flush_denormal sets it for its caller
// alone.

// The calling thread's bits for that (x86: FTZ and DAZ of MXCSR); 0 elsewhere.
uint32_t denormals_here();

// Within its scope the calling thread, and those that share its operators' work, have such bits.
class Denormals {
 public:
  explicit Denormals(uint32_t bits);
  ~Denormals();
  Denormals(const Denormals&) = delete;
  Denormals& operator=(const Denormals&) = delete;

 private:
  const uint32_t before_;
  const bool changed_;
};

// The means to notice that a user has replaced or changed any of the objects that a captured step was made from.

// An object's own attributes, borrowed; null for an object that has none, or has none yet.
PyObject* attributes_of(PyObject* object);

// Each method notes what a place says now; `current` compares all of them, by identity. It runs no code of a user's:
// nothing is hashed or asked for an attribute, and only settings are compared by value. Needs the interpreter lock in
// every call.
class Guards {
 public:
  void entry(PyObject* dict, PyObject* name);           // what a dict says under a name
  void dict(PyObject* dict);                            // all that a dict says, in the order of its entries
  void items(PyObject* container, PyTypeObject* base);  // what the iterator of `base`, a type of C's, goes over
  void cell(PyObject* cell);                            // of a closure
  void member(PyObject* object, PyObject* descriptor);  // a slot
  void object(PyObject* object);                        // its class and its own attributes
  void function(PyObject* function);                    // its code, defaults and names
  void cls(PyObject* cls);                              // what a class and its bases say
  void bytes(PyObject* object, PyTypeObject* base);     // the memory that `base`, a type of C's, says the object has
  void truth(PyObject* dict, PyObject* key);            // an entry that may change, but not to or from zero
  void hooks(PyObject* parameter);                      // there are none, and there must be none
  // What a function of Python's, torch's or NumPy's says when it is called without arguments, compared by value.
  void setting(PyObject* function);

  bool current() const;

  int visit(visitproc visit, void* arg) const { return held_.visit(visit, arg); }
  void clear();

 private:
  using Pairs = std::vector<std::pair<PyObject*, PyObject*>>;
  // Nothing of a dict needs a look while its version is the one that was looked at (PEP 509).
  struct Dict {
    PyObject* dict;
    bool whole = false;
    Pairs all;    // where it counts as a whole
    Pairs named;  // entries
    mutable uint64_t version = 0;
  };
  struct Items {
    PyObject* container;
    PyTypeObject* base;
    std::vector<PyObject*> values;
  };
  struct Member {
    PyObject* object;
    PyObject* descriptor;
    PyObject* value;
  };
  struct Object {
    PyObject* object;
    PyTypeObject* type;
    PyObject* attributes;  // null for none, and for an empty dict
  };
  struct Function {
    PyObject* function;
    PyObject* parts[5];
  };
  struct Class {
    PyTypeObject* type;
    PyObject* bases;
    PyObject* names[2];
    std::vector<std::pair<PyObject*, Pairs>> bodies;
    mutable unsigned int version = 0;
  };
  struct Bytes {
    PyObject* object;
    PyTypeObject* base;
    std::string form, contents;
  };

  Dict& watched(PyObject* dict);
  Pairs pairs_of(PyObject* dict);
  static bool holds(const Dict& dict);
  static bool holds(const Items& items);
  static bool holds(const Member& member);
  static bool holds(const Object& object);
  static bool holds(const Function& function);
  static bool holds(const Class& cls);
  static bool holds(const Bytes& bytes);

  Held held_;
  bool cleared_ = false;
  std::vector<Dict> dicts_;
  std::unordered_map<PyObject*, size_t> dict_numbers_;
  std::vector<Items> items_;
  std::vector<std::pair<PyObject*, PyObject*>> cells_;
  std::vector<Member> members_;
  std::vector<Object> objects_;
  std::vector<Function> functions_;
  std::vector<Class> classes_;
  std::vector<Bytes> bytes_;
  std::vector<std::pair<PyObject*, PyObject*>> truths_;  // dict and key
  std::vector<bool> truth_values_;
  std::vector<PyObject*> parameters_;
  std::vector<std::pair<PyObject*, PyObject*>> settings_;  // function and what it said
};

}  // namespace waterflow
