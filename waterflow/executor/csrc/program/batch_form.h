// The form of a batch that is nothing but plain tensors, as a key.
#pragma once

#include <torch/csrc/python_headers.h>

#include <string>
#include <vector>

namespace waterflow {

// Whether a tensor requires gradients, has one, or has attributes of its own.
bool carries_more(PyObject* tensor);

// Appends sizes, strides, types and devices of these tensors to `key`; False if they are not all plain memory, each
// there once. With `values` there may be numbers and text among them, of which only the type counts.
bool add_form(const std::vector<PyObject*>& items, bool values, std::string& key);

}  // namespace waterflow
