// The operators of a GPU that is not there: each that has a CUDA kernel is done by its CPU kernel over the same memory,
// in the order of the stream that it was issued on, as late as the driver's stand-in makes it.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CachingHostAllocator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

extern "C" {  // runtime.cpp
void standin_run(void* stream, std::function<void()>* work, const std::vector<std::pair<uint64_t, uint64_t>>* touches);
void standin_fill(void* stream, void* at, size_t bytes);
void standin_finish(void* stream);
int standin_launch(void* stream);
void standin_wait(void* stream, void* other);
bool standin_capturing(void* stream);
bool standin_pinned(const void* address);
}

namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::IValue;
using torch::jit::Stack;
using Change = std::function<Tensor(const Tensor&)>;

size_t bytes_of(const Tensor& tensor) {
  return tensor.numel() == 0 ? 0
                             : at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
}

void* stream_here() { return c10::cuda::getCurrentCUDAStream().stream(); }

IValue changed(const IValue& value, const Change& change) {
  if (value.isTensor()) return value.toTensor().defined() ? change(value.toTensor()) : value.toTensor();
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(tensor.defined() ? change(tensor) : tensor);
    return list;
  }
  if (value.isDevice()) return value.toDevice().is_cuda() ? IValue(c10::Device(at::kCPU)) : value;
  if (value.isList()) {
    const auto given = value.toList();
    c10::impl::GenericList list(given.elementType());
    for (size_t i = 0; i < given.size(); ++i) list.push_back(changed(given.get(i), change));
    return list;
  }
  return value;
}

void each(const Stack& stack, const std::function<void(const Tensor&)>& visit) {
  for (const IValue& value : stack) {
    changed(value, [&](const Tensor& tensor) { return visit(tensor), tensor; });
  }
}

Tensor marked(Tensor made, const Tensor& like) {
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

// The same bytes as a tensor of the CPU, which does not hold them.
Tensor bytes_on_cpu(const Tensor& tensor) {
  TORCH_CHECK(tensor.layout() == at::kStrided, "the stand-in has no ", tensor.layout(), " tensors");
  const auto options = tensor.options().device(at::kCPU).requires_grad(false);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  auto* const data = const_cast<void*>(tensor.const_data_ptr());
  return marked(at::from_blob(data, tensor.sizes(), tensor.strides(), [](void*) {}, options), tensor);
}

// Zeros in its place, to learn what an operator returns: as indices they are valid, too.
Tensor zeros_on_cpu(const Tensor& tensor) {
  auto made =
      at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU).requires_grad(false));
  if (tensor.numel() > 0) std::memset(made.mutable_data_ptr(), 0, bytes_of(tensor));
  return marked(made, tensor);
}

// -- random numbers: of a CPU generator that is made of the GPU's seed and offset when the operator is issued.

at::Generator drawn_from(const std::optional<at::Generator>& given, uint64_t* seed, uint64_t* offset) {
  auto* const generator =
      at::get_generator_or_default<at::CUDAGeneratorImpl>(given, at::cuda::detail::getDefaultCUDAGenerator());
  const std::lock_guard<std::mutex> guard(generator->mutex_);
  *seed = generator->current_seed();
  *offset = generator->get_offset();
  generator->set_offset(*offset + 4);
  return at::detail::createCPUGenerator(*seed * 0x9e3779b97f4a7c15ull + *offset);
}

bool draws(const c10::OperatorHandle& op) { return op.hasTag(at::Tag::nondeterministic_seeded); }

// Puts a CPU generator where the operator takes one; a copy for each run.
void place_generator(const c10::OperatorHandle& op, Stack& stack, const at::Generator& generator) {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* const type = arguments[i].type()->castRaw<c10::OptionalType>();
    const bool takes =
        (type != nullptr ? type->getElementType() : arguments[i].type())->kind() == c10::TypeKind::GeneratorType;
    if (takes) stack[i] = generator.clone();
  }
}

// -- one operator

// Their results' sizes, or what the host gets, are in their data: the stream is waited for.
const std::set<std::string> WAITS = {"aten::_local_scalar_dense",
                                     "aten::nonzero",
                                     "aten::nonzero.out",
                                     "aten::masked_select",
                                     "aten::masked_select.out",
                                     "aten::_unique2",
                                     "aten::unique_dim",
                                     "aten::unique_consecutive",
                                     "aten::equal",
                                     "aten::bincount",
                                     "aten::histc",
                                     "aten::repeat_interleave.Tensor",
                                     "aten::is_set_to"};

std::set<std::string> missing;  // operators without a CPU kernel

// Memory that torch has of the device.
struct Block {
  size_t bytes;
  bool used = false;            // by work that was issued: what is captured asks for memory that is still a neighbour's
  std::set<void*> others = {};  // streams that use it, too
};
std::mutex blocks_lock;
std::map<uint64_t, Block> blocks;

void mark_used(uint64_t at) {
  const std::lock_guard<std::mutex> guard(blocks_lock);
  const auto next = blocks.upper_bound(at);
  if (next == blocks.begin()) return;
  auto& [begin, block] = *std::prev(next);
  block.used = block.used || at < begin + block.bytes;
}

struct Issued {
  const c10::OperatorHandle op;
  Stack arguments;                               // of the CPU, over the same bytes
  std::unordered_set<c10::TensorImpl*> aliases;  // among them
  std::vector<std::pair<void*, size_t>> places;  // of fresh results, in their order
  at::Generator generator;
  std::vector<std::pair<uint64_t, uint64_t>> touches;  // memory of the device

  void touch(const void* at, size_t bytes) {
    const auto from = reinterpret_cast<uint64_t>(at);
    if (at != nullptr) touches.emplace_back(from, from + bytes);
  }

  void run() const {
    c10::impl::ForceDispatchKeyGuard below(
        c10::default_included_set, c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::default_excluded_set);
    Stack stack(arguments);
    if (generator.defined()) place_generator(op, stack, generator);
    op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), &stack);
    size_t next = 0;
    each(stack, [&](const Tensor& made) {
      if (!made.defined() || aliases.count(made.unsafeGetTensorImpl()) > 0 || next == places.size()) return;
      const auto [place, bytes] = places[next++];
      if (bytes > 0) std::memcpy(place, made.const_data_ptr(), bytes);
    });
  }
};

bool writes(const c10::OperatorHandle& op, size_t argument) {
  const auto* const alias = op.schema().arguments()[argument].alias_info();
  return alias != nullptr && alias->isWrite();
}

// The host goes on while this is under way: nothing of its own memory is written, unless that is pinned, and asked for.
bool runs_later(const c10::OperatorHandle& op, const Stack& given) {
  if (WAITS.count(op.schema().name() +
                  (op.schema().overload_name().empty() ? "" : "." + op.schema().overload_name()))) {
    return false;
  }
  const bool copies = op.schema().name() == "aten::copy_";
  for (size_t i = 0; i < given.size(); ++i) {
    if (!writes(op, i) || !given[i].isTensor() || !given[i].toTensor().defined() || given[i].toTensor().is_cuda())
      continue;
    return copies && given[2].toBool() && standin_pinned(given[0].toTensor().const_data_ptr());
  }
  return true;
}

Issued issue(const c10::OperatorHandle& op, const Stack& given) {
  Issued made{op};
  const bool asynchronous = op.schema().name() == "aten::copy_" && given[2].toBool();
  for (const IValue& value : given) {
    made.arguments.push_back(changed(value, [&](const Tensor& tensor) {
      if (!tensor.is_cuda()) {
        if (!asynchronous || !standin_pinned(tensor.const_data_ptr())) return marked(tensor.clone(), tensor);
        const auto& storage = tensor.storage();
        at::getHostAllocator(at::kCUDA)->record_event(const_cast<void*>(tensor.const_data_ptr()),
                                                      storage.data_ptr().get_context(),
                                                      c10::cuda::getCurrentCUDAStream());
      }
      const auto alias = bytes_on_cpu(tensor);
      made.aliases.insert(alias.unsafeGetTensorImpl());
      made.touch(tensor.is_cuda() ? tensor.const_data_ptr() : nullptr, bytes_of(tensor));
      return alias;
    }));
  }
  return made;
}

void run_operator(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  void* const stream = stream_here();
  const Stack given(stack->end() - count, stack->end());
  stack->resize(stack->size() - count);
  const int error = standin_launch(stream);
  TORCH_CHECK(error == 0, "CUDA error ", error, " at the launch of ", op.schema().name());
  const bool capturing = standin_capturing(stream), later = runs_later(op, given);
  TORCH_CHECK(later || !capturing, "operation not permitted when stream is capturing: ", op.schema().name());
  if (!later) standin_finish(stream);

  // What it returns: learnt from zeros where it runs later.
  std::unordered_map<c10::TensorImpl*, Tensor> origin;
  std::vector<std::pair<Tensor, Tensor>> resized;
  at::Generator generator;
  if (draws(op)) {
    std::optional<at::Generator> own;
    for (const IValue& value : given) {
      if (value.isGenerator()) own = value.toGenerator();
    }
    uint64_t seed = 0, offset = 0;
    generator = drawn_from(own, &seed, &offset);
  }
  Stack inner;
  for (size_t i = 0; i < count; ++i) {
    inner.push_back(changed(given[i], [&](const Tensor& tensor) {
      if (!tensor.is_cuda() && !(later && writes(op, i))) return tensor;
      const auto alias = later ? zeros_on_cpu(tensor) : bytes_on_cpu(tensor);
      origin.emplace(alias.unsafeGetTensorImpl(), tensor);
      if (tensor.numel() == 0) resized.emplace_back(alias, tensor);
      return alias;
    }));
  }
  if (generator.defined()) place_generator(op, inner, generator);
  op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), &inner);
  for (auto& [alias, tensor] : resized) {
    if (alias.sizes() == tensor.sizes()) continue;
    tensor.resize_(alias.sizes());
    if (alias.numel() > 0) tensor.as_strided_(alias.sizes(), alias.strides());
    if (!later && alias.numel() > 0) std::memcpy(tensor.mutable_data_ptr(), alias.const_data_ptr(), bytes_of(alias));
  }
  std::vector<std::pair<Tensor, Tensor>> fresh;
  for (const IValue& value : inner) {
    stack->push_back(changed(value, [&](const Tensor& tensor) {
      const auto found = origin.find(tensor.unsafeGetTensorImpl());
      if (found != origin.end()) return found->second;
      if (!tensor.is_cpu()) return tensor;
      auto place = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCUDA));
      fresh.emplace_back(tensor, place);
      return place;
    }));
  }
  if (!later) {
    for (auto& [tensor, place] : fresh) {
      if (tensor.numel() > 0) std::memcpy(place.mutable_data_ptr(), tensor.const_data_ptr(), bytes_of(tensor));
    }
    return;
  }
  auto issued = issue(op, given);
  issued.generator = generator;
  for (auto& [tensor, place] : fresh) {
    issued.places.emplace_back(tensor.numel() > 0 ? place.mutable_data_ptr() : nullptr, bytes_of(tensor));
    issued.touch(issued.places.back().first, issued.places.back().second);
  }
  const auto touches = issued.touches;
  for (const auto& [from, to] : touches) {
    if (!capturing) mark_used(from);
  }
  std::function<void()> work = [issued = std::make_shared<const Issued>(std::move(issued))] { issued->run(); };
  standin_run(stream, &work, &touches);
}

// -- operators that no CPU kernel stands for

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true) || p == 0) return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  const auto mask = p == 1 ? at::zeros_like(input, input.options().dtype(at::kBool))
                           : at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}
Tensor native_dropout_backward(const Tensor& grad, const Tensor& mask, double scale) {
  return grad.mul(mask).mul_(scale);
}

// Efficient attention, by plain mathematics. Its seed and offset are numbers that the host has, as the real one returns
// them where nothing is captured; the mask is drawn from them, forward and backward.
std::optional<Tensor> kept(const Tensor& query, const Tensor& key, double p, uint64_t seed, uint64_t offset) {
  if (p == 0) return std::nullopt;
  auto generator = at::detail::createCPUGenerator(seed * 31 + offset);
  const auto mask =
      at::empty({query.size(0), query.size(1), query.size(2), key.size(2)}, at::TensorOptions().dtype(at::kBool));
  return mask.bernoulli_(1 - p, generator).to(query.device());
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_attention(const Tensor& query, const Tensor& key,
                                                               const Tensor& value, const std::optional<Tensor>& bias,
                                                               bool wants_sums, double p, bool causal,
                                                               std::optional<double> scale) {
  uint64_t seed = 0, offset = 0;
  if (p > 0) drawn_from(std::nullopt, &seed, &offset);
  const auto mask = kept(query, key, p, seed, offset);
  const auto made =
      std::get<0>(at::_scaled_dot_product_attention_math(query, key, value, bias, p, causal, mask, scale));
  // As the real one: (batch, heads, length), and heads lie behind the length in memory.
  const auto sums =
      at::zeros({query.size(0), query.size(1), wants_sums ? query.size(2) : 0}, query.options().dtype(at::kFloat));
  const auto number = [](uint64_t n) {
    return at::scalar_tensor(static_cast<int64_t>(n), at::TensorOptions().dtype(at::kLong));
  };
  return {made.transpose(1, 2).contiguous().transpose(1, 2), sums, number(seed), number(offset)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_attention_backward(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& bias, const Tensor&,
    const Tensor&, const Tensor& seed, const Tensor& offset, double p, std::array<bool, 4> wanted, bool causal,
    std::optional<double> scale) {
  if (!grad.defined()) return {};
  const std::optional<Tensor> given = bias.defined() ? std::optional(bias) : std::nullopt;
  const auto mask = kept(query, key, p, seed.item<int64_t>(), offset.item<int64_t>());
  const auto weights =
      std::get<1>(at::_scaled_dot_product_attention_math(query, key, value, given, p, causal, mask, scale));
  const auto dropped = [&](const Tensor& tensor) { return mask ? tensor * *mask / (1 - p) : tensor; };
  const auto to_weights = dropped(at::matmul(grad, value.transpose(-2, -1)));
  const auto to_scores = weights * (to_weights - (to_weights * weights).sum(-1, true));
  const double factor = scale.value_or(1 / std::sqrt(static_cast<double>(query.size(-1))));
  return {at::matmul(to_scores, key).mul_(factor), at::matmul(to_scores.transpose(-2, -1), query).mul_(factor),
          at::matmul(dropped(weights).transpose(-2, -1), grad),
          wanted[3] && bias.defined() ? at::sum_to(to_scores, bias.sizes()) : Tensor()};
}

int64_t choose_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                         std::optional<double>, bool) {
  return static_cast<int64_t>(at::globalContext().userEnabledMemEfficientSDP() ? 2 : 0);  // efficient, or plain
}

// -- memory that was given back holds NaN, in the order of the stream that it was for

using Malloc = void* (*)(size_t, int, void*);
using Free = void (*)(void*, size_t, int, void*);
using Record = void (*)(void*, void*);
Malloc real_malloc = nullptr;
Free real_free = nullptr;
Record real_record = nullptr;
std::unique_ptr<torch::Library> library;

}  // namespace

#define STANDIN extern "C" __attribute__((visibility("default")))

STANDIN void* standin_malloc(size_t bytes, int device, void* stream) {
  void* const at = real_malloc(bytes, device, stream);
  const std::lock_guard<std::mutex> guard(blocks_lock);
  if (at != nullptr) blocks[reinterpret_cast<uint64_t>(at)] = {bytes};
  return at;
}

STANDIN void standin_free(void* at, size_t bytes, int device, void* stream) {
  Block block{bytes};
  {
    const std::lock_guard<std::mutex> guard(blocks_lock);
    if (auto found = blocks.extract(reinterpret_cast<uint64_t>(at))) block = std::move(found.mapped());
  }
  if (block.used) {
    for (void* const other : block.others) standin_wait(stream, other);
    standin_fill(stream, at, bytes);
  }
  real_free(at, bytes, device, stream);
}

STANDIN void standin_record_stream(void* at, void* stream) {
  static const bool forgets = std::getenv("STANDIN_FORGETS_USERS") != nullptr;  // a planted fault
  if (forgets) return;
  {
    const std::lock_guard<std::mutex> guard(blocks_lock);
    if (const auto found = blocks.find(reinterpret_cast<uint64_t>(at)); found != blocks.end()) {
      found->second.others.insert(stream);
    }
  }
  real_record(at, stream);
}

// What torch's pluggable allocator would call.
STANDIN void standin_memory(void* malloc, void* free, void* record) {
  real_malloc = reinterpret_cast<Malloc>(malloc);
  real_free = reinterpret_cast<Free>(free);
  real_record = reinterpret_cast<Record>(record);
}

// Puts itself in the place of torch's CUDA kernels; returns how many.
STANDIN int standin_install() {
  // Their kernels allocate, and say nothing to the device.
  static const std::set<std::string> own = {"empty.memory_format",
                                            "empty_strided",
                                            "resize_",
                                            "set_",
                                            "set_.source_Storage",
                                            "set_.source_Storage_storage_offset",
                                            "set_.source_Tensor",
                                            "record_stream",
                                            "native_dropout",
                                            "native_dropout_backward",
                                            "_scaled_dot_product_efficient_attention",
                                            "_scaled_dot_product_efficient_attention_backward",
                                            "_fused_sdp_choice"};
  static const std::set<std::string> also = {"copy_", "convolution", "convolution_backward"};
  struct : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } silent;  // that operators have kernels already
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  int count = 0;
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = name.name.rfind("aten::", 0) == 0 ? dispatcher.findOp(name) : std::nullopt;
    if (!op || !op->hasSchema()) continue;
    const std::string short_name = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    if (own.count(short_name) > 0) continue;
    if (!op->hasKernelForDispatchKey(DispatchKey::CUDA) && also.count(short_name) == 0) continue;
    const auto& returns = op->schema().returns();
    const bool view = std::any_of(returns.begin(), returns.end(), [](const auto& one) {
      return one.alias_info() != nullptr && !one.alias_info()->isWrite();
    });
    if (view) continue;
    if (!op->hasComputedKernelForDispatchKey(DispatchKey::CPU)) {
      missing.insert(short_name);
      continue;
    }
    library->impl(("aten::" + short_name).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_operator>());
    ++count;
  }
  library->impl("native_dropout", TORCH_FN(native_dropout));
  library->impl("native_dropout_backward", TORCH_FN(native_dropout_backward));
  library->impl("_scaled_dot_product_efficient_attention", TORCH_FN(efficient_attention));
  library->impl("_scaled_dot_product_efficient_attention_backward", TORCH_FN(efficient_attention_backward));
  library->impl("_fused_sdp_choice", TORCH_FN(choose_attention));
  return count;
}

STANDIN const char* standin_missing() {
  static std::string text;
  text.clear();
  for (const auto& name : missing) text += name + " ";
  return text.c_str();
}
