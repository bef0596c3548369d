// What products of small matrices ask of torch once for many of them.
#pragma once

namespace waterflow {

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
