// Products of small matrices, with BLAS's bits and without its copies; and the attributes by which loops of our own
// kernels become vectors.
#pragma once

#include <cstdint>

// Loops become vectors of the widest kind that the CPU has.
// No two operations become one: that would round otherwise. Only for the loops: what differs in these options from the
// functions around it is not inlined into them, nor they into it.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define WATERFLOW_LOOPS optimize("O3", "no-trapping-math", "fp-contract=off")
#define WATERFLOW_VECTORS __attribute__((WATERFLOW_LOOPS, target_clones("default", "avx2", "avx512f")))
#define WATERFLOW_INLINE inline __attribute__((WATERFLOW_LOOPS, always_inline))
#else
#define WATERFLOW_VECTORS
#define WATERFLOW_INLINE inline
#endif

namespace waterflow {

// Products of small matrices without the copies that BLAS makes of them first: the same bits in less time.

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

// What products of small matrices ask of torch once for many of them.

// While it lives, products on this thread go by the precision that torch was set to when it was made.
class ProductsScope {
 public:
  ProductsScope();
  ~ProductsScope();
  ProductsScope(const ProductsScope&) = delete;
  ProductsScope& operator=(const ProductsScope&) = delete;

 private:
  const bool known_before_;
};

}  // namespace waterflow
