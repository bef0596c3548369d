// A perceptron (64-128-64-10, batch 64, AdamW) trained by hand, with the products of torch's own BLAS: what
// a step would take if nothing stood around its arithmetic. Built by ``benchmarks.door``.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <vector>

extern "C" void sgemm_(const char* transpose_a, const char* transpose_b, const int* m, const int* n, const int* k,
                       const float* alpha, const float* a, const int* lda, const float* b, const int* ldb,
                       const float* beta, float* c, const int* ldc);

namespace {

constexpr int kBatch = 64;
constexpr std::array<int, 4> kSizes = {64, 128, 64, 10};
constexpr int kLayers = kSizes.size() - 1;
constexpr float kDecay = 0.01F, kBeta1 = 0.9F, kBeta2 = 0.999F, kEpsilon = 1e-8F;

// c = a b, of row-major matrices: c is m x n, and the sum goes over k. BLAS has columns first, and so b before a.
void product(bool transpose_a, bool transpose_b, int m, int n, int k, const float* a, const float* b, float* c) {
  const float one = 1, zero = 0;
  const int lda = transpose_a ? m : k, ldb = transpose_b ? k : n;
  sgemm_(transpose_b ? "T" : "N", transpose_a ? "T" : "N", &n, &m, &k, &one, b, &ldb, a, &lda, &zero, c, &n);
}

struct Layer {
  int in, out;
  float *weight, *bias, *weight_gradient, *bias_gradient;
};

void adamw(std::vector<float>& gradient, float* parameter, std::vector<float>& first, std::vector<float>& second,
           float rate, int step) {
  const auto correction1 = static_cast<float>(1 - std::pow(kBeta1, step));
  const auto correction2 = static_cast<float>(std::sqrt(1 - std::pow(kBeta2, step)));
  for (size_t i = 0; i < gradient.size(); ++i) {
    first[i] += (1 - kBeta1) * (gradient[i] - first[i]);
    second[i] = kBeta2 * second[i] + (1 - kBeta2) * gradient[i] * gradient[i];
    const float root = std::sqrt(second[i]) / correction2 + kEpsilon;
    parameter[i] = parameter[i] * (1 - rate * kDecay) - rate / correction1 * first[i] / root;
  }
}

}  // namespace

// Trains ``steps`` steps on one batch, ``x`` (64 x 64) and ``y`` (64 x 10). ``parameters`` are each layer's weight
// (out x in) and bias, one behind the other. Returns the last loss, a mean of squares.
extern "C" double train(int steps, float* parameters, const float* x, const float* y, float rate) {
  size_t count = 0;
  for (int l = 0; l < kLayers; ++l) count += static_cast<size_t>(kSizes[l] + 1) * kSizes[l + 1];
  std::vector<float> gradient(count), first(count), second(count);
  std::array<Layer, kLayers> layers{};
  std::array<std::vector<float>, kLayers> outputs, errors;
  size_t at = 0;
  for (int l = 0; l < kLayers; ++l) {
    const int in = kSizes[l], out = kSizes[l + 1];
    const size_t bias = at + static_cast<size_t>(in) * out;
    layers[l] = {in, out, parameters + at, parameters + bias, gradient.data() + at, gradient.data() + bias};
    outputs[l].resize(static_cast<size_t>(kBatch) * out);
    errors[l].resize(outputs[l].size());
    at = bias + out;
  }
  double loss = 0;
  for (int step = 1; step <= steps; ++step) {
    const float* input = x;
    for (int l = 0; l < kLayers; ++l) {
      const Layer& layer = layers[l];
      float* output = outputs[l].data();
      product(false, true, kBatch, layer.out, layer.in, input, layer.weight, output);
      for (int row = 0; row < kBatch; ++row) {
        for (int i = 0; i < layer.out; ++i) {
          float& value = output[row * layer.out + i];
          value += layer.bias[i];
          if (l + 1 < kLayers) value = std::max(value, 0.0F);
        }
      }
      input = output;
    }
    loss = 0;
    auto& last = errors[kLayers - 1];
    for (size_t i = 0; i < last.size(); ++i) {
      const float difference = input[i] - y[i];
      loss += difference * difference;
      last[i] = 2 * difference / static_cast<float>(last.size());
    }
    loss /= static_cast<double>(last.size());
    for (int l = kLayers - 1; l >= 0; --l) {
      const Layer& layer = layers[l];
      const float* below = l > 0 ? outputs[l - 1].data() : x;
      const float* error = errors[l].data();
      product(true, false, layer.out, layer.in, kBatch, error, below, layer.weight_gradient);
      std::fill_n(layer.bias_gradient, layer.out, 0.0F);
      for (int row = 0; row < kBatch; ++row) {
        for (int i = 0; i < layer.out; ++i) layer.bias_gradient[i] += error[row * layer.out + i];
      }
      if (l == 0) break;
      product(false, false, kBatch, layer.in, layer.out, error, layer.weight, errors[l - 1].data());
      for (size_t i = 0; i < errors[l - 1].size(); ++i) {
        if (outputs[l - 1][i] <= 0) errors[l - 1][i] = 0;
      }
    }
    adamw(gradient, parameters, first, second, rate, step);
  }
  return loss;
}
