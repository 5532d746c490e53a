// Device "toy": a pretend accelerator (PrivateUse1) for tests on machines without one.
//
// Memory: pages that nobody may touch, except an operator of the device while it runs; a pointer of the device that
//   reaches other code ends the process with SIGSEGV.
// Operators: those of the CPU, on the same memory. Tensors of two devices in one operator are refused, as CUDA does.
// Copies to the host that do not wait (non_blocking) arrive when the host next waits; until then the target is noise.
// Counts, while a thread counts: kernel launches, copies and waits of the host.
// Streams: operators run at once, but vector clocks report each access that nothing orders after an earlier one of
//   another stream: on a GPU, a race.

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <array>
#include <map>
#include <mutex>
#include <set>

namespace {

constexpr auto TOY = c10::DeviceType::PrivateUse1;
constexpr size_t PAGE = 4096;
constexpr int STREAMS = 64;  // 0 is the default one
using Clock = std::array<uint64_t, STREAMS>;

void raise_to(Clock& mine, const Clock& other) {
  for (int i = 0; i < STREAMS; i++) mine[i] = std::max(mine[i], other[i]);
}

struct Block {  // of memory
  size_t size = 0;
  int users = 0;  // operators that run on it now
  std::pair<int, uint64_t> written{0, 0};  // by which stream, and when
  std::map<int, uint64_t> read;
};

struct Arriving {  // a copy to the host that has not been waited for
  at::Tensor to, data;
  int stream;
};

struct State {
  std::recursive_mutex lock;  // while it is held no tensor may be copied: that can wait for Python's own lock
  std::map<uintptr_t, Block> blocks;
  std::array<Clock, STREAMS> streams{};
  Clock ended{};  // what some thread has waited for
  int made = 1;
  std::vector<Arriving> arriving;
  size_t held = 0, peak = 0;  // bytes of memory
  int64_t block = 65536;      // elements of a list of tensors that one block of threads takes
  std::set<std::string> races;
  std::map<std::string, int64_t> counts;
};

State& state() {
  static auto* one = new State;  // never destroyed: tensors may outlive everything
  return *one;
}

struct Host {  // of a thread
  int stream = 0;
  bool counting = false;
};

thread_local Host host;
using Lock = std::lock_guard<std::recursive_mutex>;

void count(const std::string& what, int64_t times = 1) {
  if (host.counting) state().counts[what] += times;
}

// Memory

Block& block_of(const void* pointer) {
  auto found = state().blocks.upper_bound(reinterpret_cast<uintptr_t>(pointer));
  TORCH_CHECK(found != state().blocks.begin(), "toy: not memory of the device");
  return (--found)->second;
}

void release(void* pointer) {
  if (!pointer) return;
  Lock held(state().lock);
  auto at = reinterpret_cast<uintptr_t>(pointer);
  state().held -= state().blocks.at(at).size;
  munmap(pointer, state().blocks.at(at).size);
  state().blocks.erase(at);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device where(TOY, 0);
    if (!bytes) return {nullptr, nullptr, &release, where};
    size_t size = (bytes + PAGE - 1) / PAGE * PAGE;
    void* fresh = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(fresh != MAP_FAILED, "toy: out of memory");
    Lock held(state().lock);
    state().blocks[reinterpret_cast<uintptr_t>(fresh)].size = size;
    state().peak = std::max(state().peak, state().held += size);
    return {fresh, fresh, &release, where};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

Allocator allocator;

bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == TOY && tensor.storage().data();
}

class Open {  // while it lives, the memory of some tensors may be touched
 public:
  void add(const at::Tensor& tensor) {
    if (!is_ours(tensor)) return;
    Lock held(state().lock);
    void* at = const_cast<void*>(tensor.storage().data());
    Block& block = block_of(at);
    if (!block.users++) mprotect(at, block.size, PROT_READ | PROT_WRITE);
    opened_.push_back(at);
  }
  ~Open() {
    Lock held(state().lock);
    for (void* at : opened_) {
      Block& block = block_of(at);
      if (!--block.users) mprotect(at, block.size, PROT_NONE);
    }
  }

 private:
  std::vector<void*> opened_;
};

at::Tensor on_host(const at::Tensor& tensor) {  // the same memory as a tensor of the CPU
  auto options = tensor.options().device(at::kCPU).pinned_memory(false).requires_grad(false);
  if (!tensor.numel()) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

// Order

void begin_on(int stream) {  // one more operation, after all that has ended
  raise_to(state().streams[stream], state().ended);
  state().streams[stream][stream]++;
}

void touch(const at::Tensor& tensor, bool writes, const std::string& name, int stream) {
  if (!is_ours(tensor)) return;
  Block& block = block_of(tensor.storage().data());
  const Clock& known = state().streams[stream];
  auto [writer, when] = block.written;
  if (known[writer] < when) state().races.insert(name + (writes ? ": write after write" : ": read after write"));
  if (!writes) {
    block.read[stream] = known[stream];
    return;
  }
  for (auto [reader, then] : block.read)
    if (known[reader] < then) state().races.insert(name + ": write after read");
  block.written = {stream, known[stream]};
  block.read.clear();
}

void wait_for(int stream, const std::string& why) {  // the host waits for a stream; why = "": not counted
  std::vector<Arriving> arrived;
  {
    Lock held(state().lock);
    raise_to(state().ended, state().streams[stream]);
    if (!why.empty()) count("syncs"), count("sync " + why);
    auto& waiting = state().arriving;
    auto rest = std::stable_partition(waiting.begin(), waiting.end(), [&](auto& each) { return each.stream != stream; });
    std::move(rest, waiting.end(), std::back_inserter(arrived));
    waiting.erase(rest, waiting.end());
  }
  for (auto& each : arrived) each.to.copy_(each.data);
}

// Operators

bool starts(const std::string& name, const char* with) { return name.rfind(with, 0) == 0; }

// CUDA's kernels of an operator; of lists of tensors as in torch's multi_tensor_apply: elements in blocks, 320 blocks
// and so many tensors a launch.
int64_t kernels_of(const std::string& name, const std::vector<at::Tensor>& listed, size_t longest) {
  if (starts(name, "aten::sort") || starts(name, "aten::nonzero") || starts(name, "aten::median")) return 3;
  if (starts(name, "aten::cat")) return (longest + 127) / 128;
  if (!starts(name, "aten::_foreach") && !starts(name, "aten::_fused")) return 1;
  size_t lists = std::max<size_t>(1, listed.size() / std::max<size_t>(1, longest));
  const size_t most[] = {110, 64, 48, 36, 30};
  size_t room = most[std::min<size_t>(lists, 5) - 1], tensors = 0;
  int64_t launches = 1, blocks = 0;
  for (size_t i = 0; i < longest; i++) {
    if (++tensors > room) launches++, tensors = 1, blocks = 0;
    for (blocks += (listed[i].numel() + state().block - 1) / state().block; blocks > 320; blocks -= 320)
      launches++, tensors = 1;
  }
  return launches;
}

struct Given {
  at::Tensor original, alias;
  bool writes;
};

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  const size_t arguments = schema.arguments().size(), first = stack->size() - arguments;
  std::vector<Given> given;
  std::vector<at::Tensor> listed;
  size_t longest = 0;
  bool on_cpu = false, ours = false;
  Open open;
  auto take = [&](const at::Tensor& tensor, bool writes) -> at::Tensor {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() != TOY) {  // CUDA takes numbers from the host, and indices
      on_cpu |= tensor.dim() > 0 && !starts(name, "aten::index") && !starts(name, "aten::_index_put");
      return tensor;
    }
    ours = true;
    open.add(tensor);
    given.push_back({tensor, on_host(tensor), writes});
    return given.back().alias;
  };
  for (size_t i = 0; i < arguments; i++) {
    c10::IValue& value = (*stack)[first + i];
    const auto* alias = schema.arguments()[i].alias_info();
    bool writes = alias && alias->isWrite();
    if (value.isTensor()) {
      value = take(value.toTensor(), writes);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> taken;
      for (const auto& tensor : value.toTensorVector()) listed.push_back(tensor), taken.push_back(take(tensor, writes));
      longest = std::max(longest, taken.size());
      value = taken;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> taken;
      for (const auto& tensor : value.toOptionalTensorVector())
        taken.push_back(tensor ? std::optional<at::Tensor>(take(*tensor, writes)) : std::nullopt);
      value = taken;
    } else if (value.isDevice()) {
      value = c10::Device(at::kCPU);
    }
  }
  TORCH_CHECK(!(ours && on_cpu), "Expected all tensors to be on the same device, but ", name, " got toy:0 and cpu");
  at::AutoDispatchBelowADInplaceOrView below;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  std::vector<at::Tensor> fresh;
  auto fill = [](const at::Tensor& tensor, const at::Tensor& with) {
    Open space;
    space.add(tensor);
    if (tensor.numel()) on_host(tensor).copy_(with);
  };
  auto give = [&](const at::Tensor& tensor) -> at::Tensor {
    if (!tensor.defined()) return tensor;
    for (const auto& each : given)
      if (each.alias.is_same(tensor)) return each.original;
    fresh.push_back(at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::Device(TOY, 0))));
    fill(fresh.back(), tensor);
    return fresh.back();
  };
  for (auto& each : given)
    if (each.writes && each.alias.sizes() != each.original.sizes())  // an out= that the operator has resized
      each.original.resize_(each.alias.sizes()), fill(each.original, each.alias);
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = give(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> made;
      for (const auto& tensor : value.toTensorVector()) made.push_back(give(tensor));
      value = made;
    }
  }
  {
    Lock held(state().lock);
    begin_on(host.stream);
    for (const auto& each : given) {
      touch(each.original, false, name, host.stream);
      if (each.writes) touch(each.original, true, name, host.stream);
    }
    for (const auto& tensor : fresh) touch(tensor, true, name, host.stream);
    int64_t kernels = kernels_of(name, listed, longest);
    count("launches", kernels), count(name.substr(6), kernels);
  }
  static const std::set<std::string> sized = {"aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2",
                                              "aten::repeat_interleave", "aten::bincount"};
  if (sized.count(name)) wait_for(host.stream, name.substr(6));
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<c10::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

void grow(const c10::Storage& storage, size_t bytes) {
  if (storage.nbytes() >= bytes) return;
  auto fresh = allocator.allocate(bytes);
  size_t old = storage.nbytes();
  if (old) {
    void *to = fresh.get(), *from = const_cast<void*>(storage.data());
    mprotect(to, bytes, PROT_READ | PROT_WRITE), mprotect(from, old, PROT_READ);
    std::memcpy(to, from, old);
    mprotect(to, bytes, PROT_NONE);
  }
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.set_nbytes(bytes);
}

const at::Tensor& resized(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  grow(self.storage(), (self.storage_offset() + self.numel()) * self.element_size());
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  if (!to.numel()) return to;
  bool up = !is_ours(self), down = !is_ours(to);
  {
    Open open;
    open.add(self), open.add(to);
    at::AutoDispatchBelowADInplaceOrView below;
    auto from = up ? self : on_host(self);
    if (down && non_blocking) {
      auto late = Arriving{to, from.clone(), host.stream};
      to.view(-1).view(at::kByte).fill_(0xA5);
      Lock held(state().lock);
      state().arriving.push_back(std::move(late));
    } else {
      (down ? to : on_host(to)).copy_(from);
    }
    Lock held(state().lock);
    begin_on(host.stream);
    touch(self, false, "copy_", host.stream), touch(to, true, "copy_", host.stream);
    count(up ? "to device" : down ? "to host" : "launches");
    if (!up && !down) count("copy_");
  }
  if ((up || down) && !non_blocking) wait_for(host.stream, up ? "copy to device" : "copy to host");
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  Open open;
  open.add(self);
  {
    Lock held(state().lock);
    begin_on(host.stream);
    touch(self, false, "item", host.stream);
    count("to host");
  }
  wait_for(host.stream, "item");
  return on_host(self).item();
}

at::Tensor& set_part(at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                     c10::SymIntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                                    offset.expect_int());
  return self;
}

at::Tensor& set_whole(at::Tensor& self, at::Storage source) {
  const c10::SymInt size(source.nbytes() / self.element_size()), one(1);
  return set_part(self, source, 0, size, one);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  std::optional<int64_t> at = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), at);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resized);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("record_stream", [](at::Tensor&, c10::Stream) {});  // memory is never handed out again
  m.impl("set_.source_Storage", set_whole);
  m.impl("set_.source_Storage_storage_offset", set_part);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("as_strided", as_strided);
  m.impl("unfold", at::native::unfold);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

void take_lists() {  // operators that loop over tensors on an unknown device, and are few kernels on CUDA
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (const auto& each : c10::Dispatcher::singleton().getAllOpNames()) {
    if (!starts(each.name, "aten::_foreach_") && !starts(each.name, "aten::_fused_adam")) continue;
    auto full = each.name.substr(6) + (each.overload_name.empty() ? "" : "." + each.overload_name);
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run>());
  }
}

// What torch asks of a device

struct Event {
  Clock clock{};
  int stream = 0;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  explicit Guard(c10::DeviceType = TOY) {}
  c10::DeviceType type() const override { return TOY; }
  c10::Device exchangeDevice(c10::Device) const override { return {TOY, 0}; }
  c10::Device getDevice() const override { return {TOY, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  static c10::Stream of(int id) { return c10::Stream(c10::Stream::UNSAFE, {TOY, 0}, id); }
  c10::Stream getStream(c10::Device) const override { return of(host.stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return of(0); }
  c10::Stream getNewStream(c10::Device, int) const override {
    Lock held(state().lock);
    TORCH_CHECK(state().made < STREAMS, "toy: no more streams");
    return of(state().made++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = of(host.stream);
    host.stream = static_cast<int>(stream.id());
    return before;
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    Lock held(state().lock);
    if (!*event) *event = new Event;
    *static_cast<Event*>(*event) = {state().streams[stream.id()], static_cast<int>(stream.id())};
  }
  void block(void* event, const c10::Stream& stream) const override {
    Lock held(state().lock);
    if (event) raise_to(state().streams[stream.id()], static_cast<Event*>(event)->clock);
  }
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void synchronizeStream(const c10::Stream& stream) const override {
    wait_for(static_cast<int>(stream.id()), "synchronize");
  }
  void synchronizeEvent(void* event) const override {
    if (event) wait_for(static_cast<Event*>(event)->stream, "synchronize");
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    for (int i = 0; i < state().made; i++) wait_for(i, "synchronize");
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
  bool isPinnedPtr(const void*) const override { return false; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override { grow(storage, size); }
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  c10::SetAllocator(TOY, &allocator);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  take_lists();
  m.def("count", [](bool on) {  // of this thread, from now on
    Lock held(state().lock);
    if (on) state().counts.clear();
    host.counting = on;
    return state().counts;
  });
  m.def("counts", [](bool on) { return std::exchange(host.counting, on); });
  m.def("block", [](int64_t elements) { state().block = elements; });
  m.def("memory", [] {  // bytes held now, and at most since the last call
    Lock held(state().lock);
    return std::make_pair(state().held, std::exchange(state().peak, state().held));
  });
  m.def("races", [] {
    Lock held(state().lock);
    return std::exchange(state().races, {});
  });
}
