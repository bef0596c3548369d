// Python objects that objects of C++ hold.
#pragma once

#include <Python.h>

#include <utility>
#include <vector>

namespace waterflow {

// References to Python objects. They go with it, also on a thread without interpreter lock; all else needs the lock.
class Held {
 public:
  Held() = default;
  Held(Held&& other) noexcept : objects_(std::exchange(other.objects_, {})) {}
  Held& operator=(Held&& other) noexcept {
    objects_.swap(other.objects_);
    return *this;
  }
  ~Held() { clear(); }
  PyObject* operator()(PyObject* object);  // a new reference to `object`, which may be null
  PyObject* take(PyObject* object);        // the caller's own reference
  PyObject* first() const { return objects_.empty() ? nullptr : objects_.front(); }
  int visit(visitproc visit, void* arg) const;
  void clear();

 private:
  std::vector<PyObject*> objects_;
};

}  // namespace waterflow
