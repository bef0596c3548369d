// The headers that most files need and that take long to read. setup.py compiles them once, before the files; a file
// still includes what it uses. None of Python's here: what they instantiate would be compiled with each file.

#include <ATen/ATen.h>
#include <torch/library.h>
