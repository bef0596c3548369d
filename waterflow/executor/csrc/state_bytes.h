// The memory that some tensors lie on, byte by byte: copied, brought back, and compared.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace waterflow {

// Each byte once, and no byte of anybody else's. Holds the tensors' storages. Host memory only.
class StateBytes {
 public:
  explicit StateBytes(const std::vector<at::Tensor>& tensors);

  // Bytes of a copy.
  int64_t bytes() const { return bytes_; }

  // What lies there now.
  at::Tensor copy() const;

  // Bring a copy back.
  void put(const at::Tensor& copy) const;

  // Whether each bit is that of a copy.
  bool is_as(const at::Tensor& copy) const;

  // One of the tensors, as it was when a copy was made: a view of the copy.
  at::Tensor then(const at::Tensor& copy, const at::Tensor& tensor) const;

 private:
  struct Span {
    char* begin;
    int64_t size;
    int64_t place;  // in a copy
  };

  std::vector<Span> spans_;  // by address
  std::vector<c10::Storage> storages_;
  int64_t bytes_ = 0;
};

}  // namespace waterflow
