// The sizes of some tensors and the memory that they lie on, byte by byte: copied, brought back, and compared.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "waterflow/executor/csrc/program/held.h"

namespace waterflow {

// Each byte once, and no byte of anybody else's. Holds the tensors and their storages. Host memory only.
class StateBytes {
 public:
  explicit StateBytes(const pybind11::sequence& tensors);

  // Bytes of a copy.
  int64_t bytes() const { return bytes_; }

  // Copy what lies there now.
  void keep();

  // Bring the copy back, and the sizes that the tensors had when this was made. What is as it was is not written.
  void put() const;

  // Whether all sizes are the old ones, and each bit is that of the copy.
  bool is_as() const;

  // One of the tensors, as it was: a view of the copy.
  at::Tensor kept(const at::Tensor& tensor) const;

  // A number of what lies there now: another one behind any change of a single word, and nearly always behind others.
  uint64_t checksum() const;

  int visit(visitproc visit, void* arg) const { return held_.visit(visit, arg); }
  void clear();

 private:
  struct Form {
    const at::Tensor* tensor;  // in its Python object
    c10::Storage storage;
    std::vector<int64_t> sizes, strides;
    int64_t offset;     // in elements
    size_t allocated;   // bytes of the storage
    int64_t place = 0;  // in the copy, in bytes

    bool holds() const;
  };

  // Kernels that resize what they are given move storages, so that no address is kept.
  struct Span {
    size_t form;    // in whose storage it lies
    int64_t begin;  // in that storage
    int64_t size;
    int64_t place;  // in the copy
  };

  const char* address(const Span& span) const {
    return static_cast<const char*>(forms_[span.form].storage.data()) + span.begin;
  }

  Held held_;
  std::vector<Form> forms_;
  std::vector<Span> spans_;  // by address
  int64_t bytes_ = 0;
  at::Tensor copy_;
};

}  // namespace waterflow
