// A CUDA device for a torch that was built without one. Tensors say cuda:0; their memory is the machine's, and the
// CPU's kernels compute on it. It is as strict as a real device about where operands lie. What is copied on a side
// stream is copied as late as CUDA may do it, and until then the target holds NaN. What would be a race is a fault.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace py = pybind11;
using at::Tensor;

namespace {

constexpr int STREAMS = 33;  // number 0 computes at once, the others are late
constexpr int UNFILLED = 0xFF;  // bytes of NaN
const c10::Device DEVICE(c10::kCUDA, 0);
std::thread::id main_thread;  // the one that has imported this
std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;

struct Block {  // an allocation, on the device or pinned
  char* start = nullptr;
  size_t size = 0;
  bool device = true, dead = false;
  int stream = 0;              // the one that it was allocated on
  std::set<int> used;          // those of record_stream
  int pending = 0, writes = 0; // late copies that read or write it, and those that write it
  uint64_t touched = 0;        // when the computing stream last wrote it
  bool computed = false;       // the computing stream has used it
  std::vector<char> unseen;    // of pinned memory: what it holds for the device, while the host may see the old bytes
};

struct Late {  // a copy that nobody has waited for
  Block *to, *from;
  std::function<void()> run;
  uint64_t number;
};

struct State {
  std::map<char*, Block*> blocks;
  std::vector<Late> queue[STREAMS];
  uint64_t waited[STREAMS] = {0};  // up to when a stream has waited for the computing one
  uint64_t clock = 1, numbers = 1;
  int streams = 0;
  size_t taken = 0, peak = 0, limit = size_t(1) << 33;
  std::map<std::string, int64_t> counts, places;
  std::vector<std::string> faults;
  bool traced = false;  // every count is kept by its place too
};

State& state() {
  static State* only = new State();
  return *only;
}

thread_local int current = 0;  // the stream
thread_local int inside = 0;   // of a CPU kernel, whose steps are not the program's

struct Inside {
  Inside() { ++inside; }
  ~Inside() { --inside; }
};

std::string tell_place() {
  py::gil_scoped_acquire gil;
  try {
    return py::module_::import("emulated_cuda").attr("tell_place")().cast<std::string>();
  } catch (py::error_already_set&) {
    return "?";
  }
}

void count(const char* what, int64_t by = 1) {
  if (inside) return;
  std::string place = state().traced ? tell_place() : "";
  Lock lock(mutex);
  state().counts[what] += by;
  if (state().traced) state().places[what + (": " + place)] += by;
}

void count_synchronisation() {  // what a thread of its own waits for keeps nobody else waiting
  count(std::this_thread::get_id() == main_thread ? "synchronisations" : "synchronisations of other threads");
}

void fault(const std::string& what) {
  std::string place = tell_place();
  Lock lock(mutex);
  state().faults.push_back(what + ": " + place);
}

Block* find(const void* at) {
  auto next = state().blocks.upper_bound((char*)at);
  if (next == state().blocks.begin()) return nullptr;
  Block* block = std::prev(next)->second;
  return (char*)at < block->start + std::max<size_t>(block->size, 1) ? block : nullptr;
}

void bury(Block* block) {
  if (!block || !block->dead || block->pending) return;
  std::free(block->start);
  delete block;
}

// Do what a stream was given before `number`; the host need not see it yet.
void run_late(int stream, uint64_t number = UINT64_MAX) {
  auto& queue = state().queue[stream];
  auto end = std::find_if(queue.begin(), queue.end(), [=](Late& late) { return late.number >= number; });
  std::vector<Late> due(queue.begin(), end);
  queue.erase(queue.begin(), end);
  for (Late& late : due) {
    late.run();
    if (late.to) --late.to->pending, --late.to->writes;
    if (late.from) --late.from->pending;
    bury(late.to);
    if (late.from != late.to) bury(late.from);
  }
}

// The host waits for a stream: it sees all that was copied to pinned memory.
void synchronize(int stream, uint64_t number = UINT64_MAX) {
  Lock lock(mutex);
  run_late(stream, number);
  for (auto& [_, block] : state().blocks) {
    if (block->unseen.empty() || block->writes) continue;
    std::memcpy(block->start, block->unseen.data(), block->size);
    block->unseen.clear();
  }
}

// Where a pinned block's bytes are, as the device sees them.
char* as_device_sees(Block* block, const void* at) {
  if (!block || block->unseen.empty()) return (char*)at;
  return block->unseen.data() + ((char*)at - block->start);
}

void* take(size_t size, bool device) {
  Lock lock(mutex);
  State& s = state();
  if (device) {
    TORCH_CHECK_WITH(OutOfMemoryError, s.taken + size <= s.limit, "CUDA out of memory: ", size, " bytes are wanted, ",
                     s.taken, " of ", s.limit, " are taken");
    s.taken += size;
    s.peak = std::max(s.peak, s.taken);
  }
  Block* block = new Block();
  block->size = size;
  block->device = device;
  block->stream = current;
  block->start = (char*)std::aligned_alloc(64, (std::max<size_t>(size, 1) + 63) / 64 * 64);
  std::memset(block->start, UNFILLED, size);
  s.blocks[block->start] = block;
  return block->start;
}

void give(void* at) {
  bool early = false;
  {
    Lock lock(mutex);
    auto entry = state().blocks.find((char*)at);
    if (entry == state().blocks.end()) return;
    Block* block = entry->second;
    if (block->device) {
      state().taken -= block->size;
      for (int stream = 1; stream < STREAMS; ++stream) {
        auto& queue = state().queue[stream];
        auto uses = [=](Late& late) { return late.to == block || late.from == block; };
        if (std::none_of(queue.begin(), queue.end(), uses)) continue;
        if (block->used.count(stream) || block->stream == stream)
          run_late(stream);  // its memory is used for nothing else before that
        else
          early = true;
      }
      early |= block->stream != 0 && block->computed && !block->used.count(0);
      std::memset(block->start, UNFILLED, block->size);
    }
    state().blocks.erase(entry);
    block->dead = true;
    bury(block);
  }
  if (early) fault("device memory is freed while another stream may use it, without record_stream");
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* at = take(size, true);
    return {at, at, &give, DEVICE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give; }
  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
};
DeviceAllocator device_allocator;

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t size) override {
    count("pinned buffers");
    void* at = take(size, false);
    return {at, at, &give, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give; }
  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
PinnedAllocator pinned_allocator;

bool is_pinned(const void* at) {
  Lock lock(mutex);
  Block* block = find(at);
  return block && !block->device;
}

// Streams and events

struct Event {  // what a stream had been given when it was recorded
  int stream;
  uint64_t clock, number;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  static c10::Stream number(int id) { return c10::Stream(c10::Stream::UNSAFE, DEVICE, id); }
  c10::Stream getStream(c10::Device) const override { return number(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return number(0); }
  c10::Stream getNewStream(c10::Device, int) const override {
    count("streams");
    Lock lock(mutex);
    return number(1 + state().streams++ % (STREAMS - 1));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return number(std::exchange(current, stream.id())); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    Lock lock(mutex);
    if (!*event) *event = new Event();
    *(Event*)*event = {(int)stream.id(), state().clock, state().numbers};
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete (Event*)event; }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    Lock lock(mutex);
    Event& before = *(Event*)event;
    uint64_t& waited = state().waited[stream.id()];
    waited = std::max(waited, before.stream ? state().waited[before.stream] : before.clock);
    if (before.stream) run_late(before.stream, before.number);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    count_synchronisation();
    synchronize((int)stream.id());
  }
  void synchronizeEvent(void* event) const override {
    count_synchronisation();
    if (event) synchronize(((Event*)event)->stream, ((Event*)event)->number);
  }
};

// Kernels

Tensor view_on_cpu(const Tensor& x, void* at = nullptr) {  // the same memory, or other of the same form
  if (!x.is_cuda() && !at) return x;
  auto options = at::TensorOptions().dtype(x.dtype()).device(at::kCPU);
  Tensor plain = at::from_blob(at ? at : const_cast<void*>(x.data_ptr()), x.sizes(), x.strides(), options);
  return x.is_conj() ? plain.conj() : plain;
}

void check_read(const Tensor& x, const std::string& reader) {
  if (inside || !x.defined() || !x.numel() || !(x.is_cuda() || x.is_cpu())) return;
  bool late = false;
  {
    Lock lock(mutex);
    if (Block* block = find(x.storage().data())) {
      late = block->writes > 0;
      block->computed |= current == 0;
    }
  }
  if (late) fault(reader + " reads what a copy on another stream has not filled yet");
}

void mark_written(const Tensor& x) {
  if (!x.defined() || !x.is_cuda() || current) return;
  Lock lock(mutex);
  if (Block* block = find(x.storage().data())) block->touched = ++state().clock, block->computed = true;
}

void copy_late(const Tensor& to, const Tensor& from, size_t bytes) {
  bool early = false;
  {
    Lock lock(mutex);
    State& s = state();
    Block *target = find(to.data_ptr()), *source = find(from.data_ptr());
    char *there = (char*)to.data_ptr(), *here = (char*)from.data_ptr();
    std::memset(there, UNFILLED, bytes);
    if (target) ++target->pending, ++target->writes;
    if (source) ++source->pending;
    for (Block* block : {target, source})
      early |= block && block->device && block->stream == 0 && block->touched > s.waited[current];
    auto run = [=] {
      if (target && !target->device && target->unseen.empty())
        target->unseen.assign(target->start, target->start + target->size);
      std::memcpy(as_device_sees(target, there), as_device_sees(source, here), bytes);
    };
    s.queue[current].push_back({target, source, run, s.numbers++});
  }
  if (early) fault("a side stream copies what the computing stream may still be using, and has not waited for it");
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (!self.numel()) return self;
  check_read(source, "copy_");
  bool up = self.is_cuda() && source.is_cpu(), down = self.is_cpu() && source.is_cuda();
  size_t bytes = self.nbytes();
  if (up) count("copies up"), count("bytes up", bytes);
  if (down) count("copies down"), count("bytes down", bytes);
  if (!up && !down) count("kernels");
  Tensor from = source.expand_as(self);
  bool plain = self.scalar_type() == from.scalar_type() && self.is_contiguous() && from.is_contiguous();
  bool pinned = up ? is_pinned(source.data_ptr()) : down && is_pinned(self.data_ptr());
  if (current && non_blocking && !inside && pinned && plain) {
    copy_late(self, from, bytes);
    return self;
  }
  if (up && !pinned) count("copies up from pageable memory");
  if (down) count_synchronisation();
  if (current) {
    Lock lock(mutex);
    run_late(current);
  }
  {
    Inside guard;
    Block* block = up && pinned ? find(from.data_ptr()) : nullptr;
    Tensor seen = block ? view_on_cpu(from, as_device_sees(block, from.data_ptr())) : view_on_cpu(from);
    view_on_cpu(self).copy_(seen);
  }
  mark_written(self);
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  Tensor target = to;
  return copy_(target, self, non_blocking);
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  if (to.sizes() != self.sizes()) to.resize_(self.sizes());
  return copy_from(self, to, false);
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   at::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &device_allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA), at::dtype_or_default(dtype));
}

at::Scalar local_scalar_dense(const Tensor& self) {
  check_read(self, "item()");
  count_synchronisation();
  Inside guard;
  return at::native::_local_scalar_dense_cpu(view_on_cpu(self));
}

void record_stream(Tensor& self, c10::Stream stream) {
  Lock lock(mutex);
  if (Block* block = find(self.storage().data())) block->used.insert((int)stream.id());
}

Tensor histc(const Tensor& self, int64_t bins, const at::Scalar& least, const at::Scalar& most) {  // of integers too
  check_read(self, "histc");
  count("kernels");
  Tensor plain = view_on_cpu(self);
  if (!plain.is_floating_point()) plain = plain.to(at::kDouble);
  return at::histc(plain, bins, least, most).to(self.options());
}

void visit(const c10::IValue& value, const std::function<void(const Tensor&)>& each) {
  if (value.isTensor()) each(value.toTensor());
  if (value.isTensorList())
    for (const Tensor& x : value.toTensorVector()) each(x);
  if (value.isOptionalTensorList())
    for (const std::optional<Tensor>& x : value.toOptionalTensorVector())
      if (x) each(*x);
}

// Everything else: checked, and left to the CPU's kernel.
void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (inside) return at::native::cpu_fallback(op, stack, true);
  static const std::set<std::string> indexing = {"aten::index", "aten::index_put", "aten::index_put_",
                                                 "aten::_index_put_impl_"};
  static const std::set<std::string> waiting = {"aten::nonzero", "aten::unique_dim", "aten::_unique2",
                                                "aten::masked_select", "aten::equal", "aten::is_nonzero"};
  const std::string& name = op.schema().name();
  bool here = false, there = false, waits = waiting.count(name);
  size_t number = 0;
  for (const c10::IValue& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    bool is_index = indexing.count(name) && number++ == 1;
    visit(value, [&](const Tensor& x) {
      if (!x.defined()) return;
      check_read(x, name);
      here |= x.is_cuda();
      there |= x.is_cpu() && x.dim() > 0 && !is_index;  // CUDA takes scalars and indices of the host
      waits |= is_index && x.scalar_type() == at::kBool;
    });
  }
  TORCH_CHECK(!(here && there),
              "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (", name, ")");
  if (waits) count_synchronisation();
  count("kernels");
  if (current) {
    Lock lock(mutex);
    run_late(current);
  }
  {
    Inside guard;
    // cpu_fallback's copies of slices are contiguous, and for these kernels round otherwise: slices are read in place
    std::vector<Tensor> sliced;
    size_t first = stack->size() - op.schema().arguments().size();
    for (size_t number = 0; number < op.schema().arguments().size(); ++number) {
      c10::IValue& value = (*stack)[first + number];
      if (!value.isTensor() || op.schema().arguments()[number].alias_info()) continue;
      Tensor x = value.toTensor();
      if (!x.defined() || !x.is_cuda() || x.is_conj() || x.is_non_overlapping_and_dense()) continue;
      sliced.push_back(x);
      value = view_on_cpu(x);
    }
    at::native::cpu_fallback(op, stack, true);
    for (size_t number = stack->size() - op.schema().returns().size(); number < stack->size(); ++number) {
      c10::IValue& value = (*stack)[number];  // where all that was given is slices, nothing says where it is wanted
      if (!sliced.empty() && value.isTensor() && value.toTensor().defined() && value.toTensor().is_cpu())
        value = value.toTensor().to(DEVICE);
    }
  }
  for (const c10::IValue& value : torch::jit::last(*stack, op.schema().returns().size())) visit(value, mark_written);
}

}  // namespace

namespace at {
struct EmulatedHooks final : CUDAHooksInterface {
  explicit EmulatedHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  int getNumGPUs() const override { return 1; }
  bool isPinnedPtr(const void* at) const override { return is_pinned(at); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  Device getDeviceFromPtr(void*) const override { return DEVICE; }
  void deviceSynchronize(DeviceIndex) const override {}
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(EmulatedHooks)
}  // namespace at

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", [](const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                          std::optional<int64_t> offset) {
    return at::native::as_strided_tensorimpl(self, size, stride, offset);
  });
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("resize_", [](const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) -> const Tensor& {
    return at::native::resize_(self, size, format);
  });
  m.impl("set_.source_Storage_storage_offset", [](Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                                                  at::IntArrayRef stride) -> Tensor& {
    return at::native::set_storage_cpu_(self, source, offset, size, stride);
  });
  m.impl("set_.source_Storage", [](Tensor& self, at::Storage source) -> Tensor& { return at::native::set_(self, source); });
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl("copy_", TORCH_FN(copy_));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("histc", TORCH_FN(histc));
  // composite ones, which would ask for cuDNN or fused kernels on the way: one kernel there, one here
  for (const char* name : {"convolution", "scaled_dot_product_attention", "linear", "index.Tensor", "matmul",
                           "native_layer_norm", "native_group_norm"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fall_back>());
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  main_thread = std::this_thread::get_id();
  c10::SetAllocator(c10::kCUDA, &device_allocator, 100);
  at::setHostAllocator(c10::kCUDA, &pinned_allocator, 100);
  m.def("empty_pinned", [](std::vector<int64_t> size, py::object dtype) -> Tensor {
    return at::detail::empty_generic(size, &pinned_allocator, c10::DispatchKeySet(c10::DispatchKey::CPU),
                                     torch::python::detail::py_object_to_dtype(dtype), std::nullopt);
  });
  m.def("is_pinned", [](const Tensor& x) { return x.is_cpu() && is_pinned(x.storage().data()); });
  m.def("exchange_stream", [](int stream) { return std::exchange(current, stream); });
  m.def("current_stream", [] { return current; });
  m.def("synchronize", [] { for (int stream = 1; stream < STREAMS; ++stream) synchronize(stream); });
  m.def("set_limit", [](size_t bytes) { state().limit = bytes; });
  m.def("limit", [] { return state().limit; });
  m.def("taken", [] { return state().taken; });
  m.def("peak", [] { return state().peak; });
  m.def("counts", [] { Lock lock(mutex); return state().counts; });
  m.def("trace", [](bool traced) { state().traced = traced; });
  m.def("places", [] { Lock lock(mutex); return state().places; });
  m.def("faults", [] { Lock lock(mutex); return state().faults; });
  m.def("reset", [] { Lock lock(mutex); state().counts.clear(); state().places.clear(); state().faults.clear(); state().peak = state().taken; });
}
