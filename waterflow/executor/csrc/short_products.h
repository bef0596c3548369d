// Products of small matrices without the copies that BLAS makes of them first: the same bits in less time.
#pragma once

#include <cstdint>

namespace waterflow {

// BLAS, by columns: c = alpha a b + beta c.
using Gemm = void(const char* turn_a, const char* turn_b, const int* m, const int* n, const int* k, const float* alpha,
                  const float* a, const int* lda, const float* b, const int* ldb, const float* beta, float* c,
                  const int* ldc);

// Of a matrix: 'n' where the elements of a row stand together, 't' where those of a column do; and how far apart the
// rows or columns are.
struct Side {
  char turn;
  int apart;
};

// result = left right + bias; rows of `result` stand together, and `bias` (null: none) is added to each.
struct Product {
  const float* left;
  Side left_side;
  const float* right;
  Side right_side;
  const float* bias;
  float* result;
  int rows, columns, inner;

  void by(Gemm* gemm) const;
};

// Makes the product where that gives the bits of `gemm`, and is faster: found out when a shape is first met. False
// where it is left to `gemm`. Any thread; asks no allocator of torch's.
bool multiply_shortly(const Product& product, Gemm* gemm);

// Of how many shapes it makes the products.
int64_t short_products();

}  // namespace waterflow
