// Random masks on the CPU: the bits of torch's, and its generator's, in less time.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <mutex>
#include <optional>

#include "vectors.h"

namespace waterflow {
namespace {

constexpr int kWords = at::MERSENNE_STATE_N, kAhead = at::MERSENNE_STATE_M;

WATERFLOW_INLINE uint32_t twisted(uint32_t u, uint32_t v) {
  return (((u & at::UMASK) | (v & at::LMASK)) >> 1) ^ (-(v & 1) & at::MATRIX_A);
}

// at::mt19937's next state, from Matsumoto and Nishimura's recurrence.
WATERFLOW_VECTORS void twist(uint32_t* __restrict p) {
  const uint32_t* q = p;  // read before it is written, or 227 words behind
  constexpr int kBehind = kWords - kAhead;
#pragma GCC ivdep
  for (int j = 0; j < kBehind; ++j) p[j] = q[j + kAhead] ^ twisted(q[j], q[j + 1]);
  for (int begin = kBehind; begin < kWords - 1; begin += kBehind) {
    const int end = std::min(begin + kBehind, kWords - 1);
#pragma GCC ivdep
    for (int j = begin; j < end; ++j) p[j] = q[j - kBehind] ^ twisted(q[j], q[j + 1]);
  }
  p[kWords - 1] = p[kAhead - 1] ^ twisted(p[kWords - 1], p[0]);
}

WATERFLOW_VECTORS void temper(const uint32_t* __restrict from, uint32_t* __restrict to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    uint32_t y = from[i];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680;
    y ^= (y << 15) & 0xefc60000;
    to[i] = y ^ (y >> 18);
  }
}

// The next `count` words of the generator behind `state`.
void draw(at::mt19937_data_pod& state, uint32_t* to, int64_t count) {
  while (count > 0) {
    int64_t ready = state.left_ - 1;
    if (ready == 0) {
      twist(state.state_.data());
      ready = kWords;
      state.left_ = kWords + 1;
      state.next_ = 0;
    }
    const int64_t taken = std::min(ready, count);
    temper(state.state_.data() + state.next_, to, taken);
    state.left_ -= static_cast<int>(taken);
    state.next_ += static_cast<uint32_t>(taken);
    to += taken;
    count -= taken;
  }
}

// A uniform number is 53 bits of two words, the higher first; `high` and `low` are the bound's.
template <typename T>
WATERFLOW_INLINE void choose(const uint32_t* __restrict words, int64_t count, uint32_t high, uint32_t low, T yes, T no,
                             T* __restrict to) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t top = words[2 * i] & 0x1fffff, bottom = words[2 * i + 1];
    to[i] = ((top < high) | ((top == high) & (bottom < low))) ? yes : no;
  }
}
WATERFLOW_VECTORS void choose_floats(const uint32_t* words, int64_t count, uint32_t high, uint32_t low, float yes,
                                     float no, float* to) {
  choose(words, count, high, low, yes, no, to);
}
WATERFLOW_VECTORS void choose_doubles(const uint32_t* words, int64_t count, uint32_t high, uint32_t low, double yes,
                                      double no, double* to) {
  choose(words, count, high, low, yes, no, to);
}

// `yes` with probability p, else `no`, for each element in the order of memory.
void fill_mask(const at::TensorBase& mask, double p, double yes, double no,
               const std::optional<at::Generator>& generator) {
  constexpr int64_t kBlock = 512;
  uint32_t words[2 * kBlock];
  const auto bound = static_cast<uint64_t>(std::ceil(std::ldexp(p, 53)));
  const auto high = static_cast<uint32_t>(bound >> 32), low = static_cast<uint32_t>(bound);
  auto* own = at::get_generator_or_default<at::CPUGeneratorImpl>(generator, at::detail::getDefaultCPUGenerator());
  std::lock_guard<std::mutex> lock(own->mutex_);
  at::mt19937 engine = own->engine();
  at::mt19937_data_pod state = engine.data();
  const bool floats = mask.scalar_type() == at::kFloat;
  void* data = mask.mutable_data_ptr();
  const int64_t numel = mask.numel();
  for (int64_t begin = 0; begin < numel; begin += kBlock) {
    const int64_t count = std::min(kBlock, numel - begin);
    draw(state, words, 2 * count);
    if (floats) {
      choose_floats(words, count, high, low, static_cast<float>(yes), static_cast<float>(no),
                    static_cast<float*>(data) + begin);
    } else {
      choose_doubles(words, count, high, low, yes, no, static_cast<double*>(data) + begin);
    }
  }
  engine.set_data(state);
  own->set_engine(engine);
}

// On other CPUs torch seeds a generator of MKL's from one word. Asks torch's allocators for nothing.
bool torch_draws_word_by_word() {
  static const bool does = [] {
    constexpr int64_t kTried = 701;  // more than one state of the generator
    auto generator = at::detail::createCPUGenerator(2147483647), other = at::detail::createCPUGenerator(2147483647);
    auto &ours = *generator.get<at::CPUGeneratorImpl>(), &theirs = *other.get<at::CPUGeneratorImpl>();
    std::array<double, kTried> drawn{}, expected{};
    auto mask = at::from_blob(drawn.data(), {kTried}, at::kDouble);
    fill_mask(mask, 0.7, 1, 0, generator);
    at::from_blob(expected.data(), {kTried}, at::kDouble).bernoulli_(0.7, other);
    return drawn == expected && ours.random64() == theirs.random64();
  }();
  return does;
}

bool can_draw(const at::Tensor& like, double p) {
  return (like.scalar_type() == at::kFloat || like.scalar_type() == at::kDouble) && p >= 0 && p <= 1 &&
         like.is_non_overlapping_and_dense() && torch_draws_word_by_word();
}

at::Tensor& bernoulli(at::Tensor& self, double p, std::optional<at::Generator> generator) {
  if (!can_draw(self, p)) return self.bernoulli_(p, std::move(generator));
  fill_mask(self, p, 1, 0, generator);
  return self;
}

// empty_like(like).bernoulli_(keep).div_(keep)
at::Tensor dropout_mask(const at::Tensor& like, double keep, std::optional<at::Generator> generator) {
  if (!can_draw(like, keep)) return at::empty_like(like).bernoulli_(keep, std::move(generator)).div_(keep);
  const auto mask = at::Tensor(at::detail::empty_strided_cpu(like.sizes(), like.strides(), like.scalar_type()));
  if (like.scalar_type() == at::kFloat) {
    const auto divisor = static_cast<float>(keep);
    fill_mask(mask, keep, 1.0f / divisor, 0.0f / divisor, generator);
  } else {
    fill_mask(mask, keep, 1.0 / keep, 0.0 / keep, generator);
  }
  return mask;
}

}  // namespace
}  // namespace waterflow

TORCH_LIBRARY_FRAGMENT(waterflow, m) {
  m.def("bernoulli_(Tensor(a!) self, float p=0.5, *, Generator? generator=None) -> Tensor(a!)");
  m.def("dropout_mask(Tensor like, float p, *, Generator? generator=None) -> Tensor");
}
TORCH_LIBRARY_IMPL(waterflow, CPU, m) {
  m.impl("bernoulli_", &waterflow::bernoulli);
  m.impl("dropout_mask", &waterflow::dropout_mask);
}
