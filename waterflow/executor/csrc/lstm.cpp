// A layer of LSTM cells (Hochreiter and Schmidhuber 1997) and its gradients, for small batches, where oneDNN's products
// of one step of time are half as fast as those of all. Its sums are rounded in another order, and its sigmoid and tanh
// are polynomials of their own.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <vector>

#include "exponential.h"
#include "rows.h"

namespace waterflow {
namespace {

constexpr int64_t kLstm = 2;  // torch's number of that kind of layer

[[maybe_unused]] at::Tensor floats(at::IntArrayRef sizes) {
  return at::Tensor(at::detail::empty_cpu(sizes, at::kFloat));
}

#ifdef WATERFLOW_FUSED

// -- one vector

WATERFLOW_FUSED_INLINE __m256 sigmoid_of(__m256 x) {
  const __m256 one = _mm256_set1_ps(1.0f);
  return _mm256_div_ps(one, _mm256_add_ps(one, exp_of(_mm256_sub_ps(_mm256_setzero_ps(), x))));
}

// A polynomial near zero (Cephes), where 1 - 2 / (e^2x + 1) would lose digits.
WATERFLOW_FUSED_INLINE __m256 tanh_of(__m256 x) {
  const __m256 one = _mm256_set1_ps(1.0f);
  const __m256 square = _mm256_mul_ps(x, x);
  __m256 sum = _mm256_set1_ps(-5.70498872745e-3f);
  sum = _mm256_fmadd_ps(sum, square, _mm256_set1_ps(2.06390887954e-2f));
  sum = _mm256_fmadd_ps(sum, square, _mm256_set1_ps(-5.37397155531e-2f));
  sum = _mm256_fmadd_ps(sum, square, _mm256_set1_ps(1.33314422036e-1f));
  sum = _mm256_fmadd_ps(sum, square, _mm256_set1_ps(-3.33332819422e-1f));
  const __m256 near = _mm256_fmadd_ps(_mm256_mul_ps(sum, square), x, x);
  const __m256 far =
      _mm256_sub_ps(one, _mm256_div_ps(_mm256_set1_ps(2.0f), _mm256_add_ps(exp_of(_mm256_add_ps(x, x)), one)));
  const __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
  return _mm256_blendv_ps(far, near, _mm256_cmp_ps(size, _mm256_set1_ps(0.625f), _CMP_LT_OQ));
}

// -- products with a matrix that is used in every step of time

// A matrix of `inner` by `columns` in panels of kColumns columns, each of which stands together.
class Panels {
 public:
  // Element (k, n) stands at k * inner_apart + n, or, turned, at n * inner_apart + k.
  Panels(const float* matrix, int64_t inner, int64_t columns, int64_t inner_apart, bool turned)
      : inner_(inner), columns_(columns), memory_(floats({inner * columns})) {
    auto* to = memory_.mutable_data_ptr<float>();
    for (int64_t column = 0; column < columns; column += kColumns, to += inner * kColumns) {
      if (turned) {
        turn_columns(matrix + column * inner_apart, inner_apart, inner, to);
      } else {
        for (int64_t k = 0; k < inner; ++k) {
          std::copy_n(matrix + k * inner_apart + column, kColumns, to + k * kColumns);
        }
      }
    }
  }

  // to = left matrix + added; rows of `left` stand `left_apart`, those of the others as many as there are columns.
  void multiply(const float* left, int64_t left_apart, int64_t rows, const float* added, float* to) const {
    for (int64_t begin = 0; begin < inner_; begin += kMostInner) {
      const int64_t inner = std::min(kMostInner, inner_ - begin);
      const float* const before = begin == 0 ? added : to;
      const auto* panel = memory_.const_data_ptr<float>() + begin * kColumns;
      for (int64_t column = 0; column < columns_; column += kColumns, panel += inner_ * kColumns) {
        multiply_all_rows(rows, left + begin, left_apart, 1, panel, kColumns,
                          before == nullptr ? nullptr : before + column, columns_, to + column, columns_, inner);
      }
    }
  }

 private:
  static constexpr int64_t kMostInner = 256;  // whose panel stays in the first cache
  const int64_t inner_, columns_;
  const at::Tensor memory_;
};

// -- one step of time of one sequence

// Gates in the order of torch's weights: input, forget, cell, output; made of sums in their place.
WATERFLOW_FUSED void step_forward(float* gates, const float* before, float* cells, float* squashed, float* output,
                                  int64_t hidden) {
  for (int64_t i = 0; i < hidden; i += 8) {
    const __m256 in = sigmoid_of(_mm256_loadu_ps(gates + i));
    const __m256 forget = sigmoid_of(_mm256_loadu_ps(gates + hidden + i));
    const __m256 made = tanh_of(_mm256_loadu_ps(gates + 2 * hidden + i));
    const __m256 out = sigmoid_of(_mm256_loadu_ps(gates + 3 * hidden + i));
    const __m256 cell = _mm256_fmadd_ps(forget, _mm256_loadu_ps(before + i), _mm256_mul_ps(in, made));
    const __m256 shown = tanh_of(cell);
    _mm256_storeu_ps(gates + i, in);
    _mm256_storeu_ps(gates + hidden + i, forget);
    _mm256_storeu_ps(gates + 2 * hidden + i, made);
    _mm256_storeu_ps(gates + 3 * hidden + i, out);
    _mm256_storeu_ps(cells + i, cell);
    _mm256_storeu_ps(squashed + i, shown);
    _mm256_storeu_ps(output + i, _mm256_mul_ps(out, shown));
  }
}

WATERFLOW_FUSED_INLINE __m256 slope(__m256 gate) {
  return _mm256_mul_ps(gate, _mm256_sub_ps(_mm256_set1_ps(1.0f), gate));
}

// `of_cells` is that of the step behind, and becomes that of the step before.
WATERFLOW_FUSED void step_backward(const float* gates, const float* before, const float* squashed,
                                   const float* of_output, const float* of_hidden, float* of_cells, float* of_gates,
                                   int64_t hidden) {
  const __m256 one = _mm256_set1_ps(1.0f);
  for (int64_t i = 0; i < hidden; i += 8) {
    const __m256 in = _mm256_loadu_ps(gates + i), forget = _mm256_loadu_ps(gates + hidden + i);
    const __m256 made = _mm256_loadu_ps(gates + 2 * hidden + i), out = _mm256_loadu_ps(gates + 3 * hidden + i);
    const __m256 shown = _mm256_loadu_ps(squashed + i);
    __m256 gradient = _mm256_loadu_ps(of_hidden + i);
    if (of_output != nullptr) gradient = _mm256_add_ps(gradient, _mm256_loadu_ps(of_output + i));
    const __m256 of_cell = _mm256_fmadd_ps(_mm256_mul_ps(gradient, out), _mm256_fnmadd_ps(shown, shown, one),
                                           _mm256_loadu_ps(of_cells + i));
    _mm256_storeu_ps(of_gates + i, _mm256_mul_ps(_mm256_mul_ps(of_cell, made), slope(in)));
    _mm256_storeu_ps(of_gates + hidden + i,
                     _mm256_mul_ps(_mm256_mul_ps(of_cell, _mm256_loadu_ps(before + i)), slope(forget)));
    _mm256_storeu_ps(of_gates + 2 * hidden + i,
                     _mm256_mul_ps(_mm256_mul_ps(of_cell, in), _mm256_fnmadd_ps(made, made, one)));
    _mm256_storeu_ps(of_gates + 3 * hidden + i, _mm256_mul_ps(_mm256_mul_ps(gradient, shown), slope(out)));
    _mm256_storeu_ps(of_cells + i, _mm256_mul_ps(of_cell, forget));
  }
}

// -- layers

// What a layer keeps for its gradients: gates, cells and their tanh, for each step of time and sequence. What oneDNN
// keeps is of bytes.
struct Kept {
  at::Tensor all;  // [times, batch, 6 hidden]
  int64_t batch, hidden;

  float* gates(int64_t time) const { return all.mutable_data_ptr<float>() + time * batch * 6 * hidden; }
  float* cells(int64_t time) const { return gates(time) + batch * 4 * hidden; }
  float* squashed(int64_t time) const { return cells(time) + batch * hidden; }
};

using Layer = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

Layer forward(const at::Tensor& input, const at::Tensor& of_input, const at::Tensor& of_hidden, const at::Tensor& bias,
              const at::Tensor& hidden_before, const at::Tensor& cells_before) {
  const int64_t times = input.size(0), batch = input.size(1), hidden = of_hidden.size(1);
  const auto flat = input.reshape({times * batch, input.size(2)});
  auto sums = bias.defined() ? at::addmm(bias, flat, of_input.t()) : at::mm(flat, of_input.t());
  const auto first_hidden = hidden_before.reshape({batch, hidden}).contiguous();
  const auto first_cells = cells_before.reshape({batch, hidden}).contiguous();
  const auto output = floats({times, batch, hidden});
  const Kept kept{floats({times, batch, 6 * hidden}), batch, hidden};
  const Panels weights(of_hidden.const_data_ptr<float>(), hidden, 4 * hidden, hidden, true);
  const auto* state = first_hidden.const_data_ptr<float>();
  const auto* cells = first_cells.const_data_ptr<float>();
  auto* to = output.mutable_data_ptr<float>();
  for (int64_t time = 0; time < times; ++time) {
    auto* gates = kept.gates(time);
    weights.multiply(state, hidden, batch, sums.const_data_ptr<float>() + time * batch * 4 * hidden, gates);
    for (int64_t row = 0; row < batch; ++row) {
      step_forward(gates + row * 4 * hidden, cells + row * hidden, kept.cells(time) + row * hidden,
                   kept.squashed(time) + row * hidden, to + row * hidden, hidden);
    }
    state = to;
    cells = kept.cells(time);
    to += batch * hidden;
  }
  const auto last = floats({batch, hidden});
  const auto last_cells = floats({batch, hidden});
  std::copy_n(state, batch * hidden, last.mutable_data_ptr<float>());
  std::copy_n(cells, batch * hidden, last_cells.mutable_data_ptr<float>());
  return {output, last.view(hidden_before.sizes()), last_cells.view(cells_before.sizes()), kept.all};
}

struct Gradients {
  at::Tensor input, of_input, of_hidden, bias, hidden_before, cells_before;
};

Gradients backward(const at::Tensor& input, const at::Tensor& of_input, const at::Tensor& of_hidden,
                   const at::Tensor& hidden_before, const at::Tensor& cells_before, const at::Tensor& output,
                   const at::Tensor& of_output, const at::Tensor& of_last, const at::Tensor& of_last_cells,
                   const at::Tensor& workspace) {
  const int64_t times = input.size(0), batch = input.size(1), hidden = of_hidden.size(1);
  const Kept kept{workspace, batch, hidden};
  const auto first_cells = cells_before.reshape({batch, hidden}).contiguous();
  const auto given = of_output.defined() ? of_output.contiguous() : of_output;
  const auto start = [&](const at::Tensor& last) {
    return last.defined() ? last.reshape({batch, hidden}).clone(at::MemoryFormat::Contiguous)
                          : at::zeros({batch, hidden}, input.options());
  };
  const auto of_state = start(of_last), of_cells = start(of_last_cells);
  const auto of_gates = floats({times * batch, 4 * hidden});
  {
    const Panels weights(of_hidden.const_data_ptr<float>(), 4 * hidden, hidden, hidden, false);
    auto *states = of_state.mutable_data_ptr<float>(), *cells = of_cells.mutable_data_ptr<float>();
    for (int64_t time = times - 1; time >= 0; --time) {
      auto* const made = of_gates.mutable_data_ptr<float>() + time * batch * 4 * hidden;
      const auto* const before = time == 0 ? first_cells.const_data_ptr<float>() : kept.cells(time - 1);
      const auto* const of_time = given.defined() ? given.const_data_ptr<float>() + time * batch * hidden : nullptr;
      for (int64_t row = 0; row < batch; ++row) {
        step_backward(kept.gates(time) + row * 4 * hidden, before + row * hidden, kept.squashed(time) + row * hidden,
                      of_time == nullptr ? nullptr : of_time + row * hidden, states + row * hidden,
                      cells + row * hidden, made + row * 4 * hidden, hidden);
      }
      weights.multiply(made, 4 * hidden, batch, nullptr, states);
    }
  }
  const auto flat = input.reshape({times * batch, input.size(2)});
  const auto turned = of_gates.t();
  const auto states = output.reshape({times * batch, hidden});
  auto of_weights = at::mm(turned.narrow(1, 0, batch), hidden_before.reshape({batch, hidden}));
  if (times > 1) {
    of_weights.addmm_(turned.narrow(1, batch, (times - 1) * batch), states.narrow(0, 0, (times - 1) * batch));
  }
  return {at::mm(of_gates, of_input).view({times, batch, input.size(2)}),
          at::mm(turned, flat),
          of_weights,
          at::sum(of_gates, 0),
          of_state.view(hidden_before.sizes()),
          of_cells.view(cells_before.sizes())};
}

#endif

// -- operators, with the arguments of those of torch

bool can_make(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& state, bool reverse,
              at::IntArrayRef batch_sizes, int64_t mode, bool train) {
#ifdef WATERFLOW_FUSED
  return mode == kLstm && train && !reverse && batch_sizes.empty() && can_fuse() && input.dim() == 3 &&
         input.numel() > 0 && input.scalar_type() == at::kFloat && weight.scalar_type() == at::kFloat &&
         state.scalar_type() == at::kFloat && weight.is_contiguous() && weight.size(1) % kColumns == 0;
#else
  return false;
#endif
}

Layer lstm_layer(const at::Tensor& input, const at::Tensor& weight0, const at::Tensor& weight1,
                 const at::Tensor& weight2, const at::Tensor& weight3, const at::Tensor& hx_, const at::Tensor& cx_,
                 bool reverse, at::IntArrayRef batch_sizes, int64_t mode, int64_t hidden_size, int64_t num_layers,
                 bool has_biases, bool bidirectional, bool batch_first, bool train) {
#ifdef WATERFLOW_FUSED
  if (can_make(input, weight1, cx_, reverse, batch_sizes, mode, train)) {
    return forward(input, weight0, weight1, has_biases ? weight2 + weight3 : at::Tensor(), hx_, cx_);
  }
#endif
  return at::mkldnn_rnn_layer(input, weight0, weight1, weight2, weight3, hx_, cx_, reverse, batch_sizes, mode,
                              hidden_size, num_layers, has_biases, bidirectional, batch_first, train);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> lstm_layer_backward(
    const at::Tensor& input, const at::Tensor& weight1, const at::Tensor& weight2, const at::Tensor& weight3,
    const at::Tensor& weight4, const at::Tensor& hx_, const at::Tensor& cx_tmp, const at::Tensor& output,
    const at::Tensor& hy_, const at::Tensor& cy_, const std::optional<at::Tensor>& grad_output,
    const std::optional<at::Tensor>& grad_hy, const std::optional<at::Tensor>& grad_cy, bool reverse, int64_t mode,
    int64_t hidden_size, int64_t num_layers, bool has_biases, bool train, bool bidirectional,
    at::IntArrayRef batch_sizes, bool batch_first, const at::Tensor& workspace) {
#ifdef WATERFLOW_FUSED
  if (workspace.scalar_type() == at::kFloat) {
    const auto made = backward(input, weight1, weight2, hx_, cx_tmp, output, grad_output.value_or(at::Tensor()),
                               grad_hy.value_or(at::Tensor()), grad_cy.value_or(at::Tensor()), workspace);
    return {made.input,        made.of_input,      made.of_hidden,   made.bias,
            made.bias.clone(), made.hidden_before, made.cells_before};
  }
#endif
  return at::mkldnn_rnn_layer_backward(input, weight1, weight2, weight3, weight4, hx_, cx_tmp, output, hy_, cy_,
                                       grad_output, grad_hy, grad_cy, reverse, mode, hidden_size, num_layers,
                                       has_biases, train, bidirectional, batch_sizes, batch_first, workspace);
}

}  // namespace
}  // namespace waterflow

TORCH_LIBRARY_FRAGMENT(waterflow, m) {
  m.def(
      "lstm_layer(Tensor input, Tensor weight0, Tensor weight1, Tensor weight2, Tensor weight3, Tensor hx_, Tensor "
      "cx_, bool reverse, int[] batch_sizes, int mode, int hidden_size, int num_layers, bool has_biases, bool "
      "bidirectional, bool batch_first, bool train) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "lstm_layer_backward(Tensor input, Tensor weight1, Tensor weight2, Tensor weight3, Tensor weight4, Tensor hx_, "
      "Tensor cx_tmp, Tensor output, Tensor hy_, Tensor cy_, Tensor? grad_output, Tensor? grad_hy, Tensor? grad_cy, "
      "bool reverse, int mode, int hidden_size, int num_layers, bool has_biases, bool train, bool bidirectional, "
      "int[] batch_sizes, bool batch_first, Tensor workspace) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, "
      "Tensor)");
}
TORCH_LIBRARY_IMPL(waterflow, CPU, m) {
  m.impl("lstm_layer", &waterflow::lstm_layer);
  m.impl("lstm_layer_backward", &waterflow::lstm_layer_backward);
}
