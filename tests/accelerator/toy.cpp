// Memory and streams of the device "toy" (PrivateUse1); toy.py has its operators, and says what it is for.
//
// Memory: a device pointer leads to pages that nobody may touch; the data are elsewhere, and only `host` finds them.
//   Host code that follows a device pointer ends the process with SIGSEGV.
// Streams: operators run immediately, but vector clocks report each access that nothing orders after an earlier access
//   on another stream: on a GPU, a race.

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
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
constexpr int STREAMS = 256;  // 0 is the default one
using Clock = std::array<uint64_t, STREAMS>;

void raise_to(Clock& mine, const Clock& other) {
  for (int i = 0; i < STREAMS; i++) mine[i] = std::max(mine[i], other[i]);
}

struct Block {  // of memory
  void *pages, *data;
  size_t size;
  std::pair<int, uint64_t> written{0, 0};  // by which stream, and when
  std::map<int, uint64_t> read;
};

struct State {
  std::mutex lock;
  std::array<Clock, STREAMS> streams{};
  Clock ended{};  // the work that some thread has waited for
  int made = 1;
  size_t held = 0, peak = 0;  // bytes of memory
  std::set<std::string> races;
};

State& state() {
  static auto* one = new State;  // never destroyed: tensors may outlive everything
  return *one;
}

thread_local int current = 0;  // this thread's stream
thread_local c10::DeviceIndex device = 0;  // the current one
using Lock = std::lock_guard<std::mutex>;

// Memory

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  munmap(block->pages, block->size), std::free(block->data);
  Lock held(state().lock);
  state().held -= block->size;
  delete block;
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device where(TOY, 0);
    if (!bytes) return {nullptr, where};
    size_t size = (bytes + PAGE - 1) / PAGE * PAGE;
    void* pages = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    auto* block = new Block{pages, std::calloc(size, 1), size};
    Lock held(state().lock);
    state().peak = std::max(state().peak, state().held += size);
    return {pages, block, &release, where};
  }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "toy: nobody asked for this"); }
};

Allocator allocator;

Block* block_of(const at::Tensor& tensor) {  // nullptr for CPU tensors, and for tensors without elements
  if (tensor.device().type() != TOY || !tensor.numel()) return nullptr;
  return static_cast<Block*>(tensor.storage().data_ptr().get_context());
}

at::Tensor host(const at::Tensor& tensor) {  // the same memory as a CPU tensor
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  Block* block = block_of(tensor);
  if (!block) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  auto* first = static_cast<char*>(block->data) + tensor.storage_offset() * tensor.element_size();
  return at::from_blob(first, tensor.sizes(), tensor.strides(), options);
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

const at::Tensor& resized(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  size_t bytes = (self.storage_offset() + self.numel()) * self.element_size();
  if (self.storage().nbytes() < bytes) {
    auto fresh = allocator.allocate(bytes);
    if (auto* old = static_cast<Block*>(self.storage().data_ptr().get_context()))
      std::memcpy(static_cast<Block*>(fresh.get_context())->data, old->data, self.storage().nbytes());
    self.storage().set_data_ptr_noswap(std::move(fresh));
    self.storage().set_nbytes(bytes);
  }
  return self;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resized);
  m.impl("record_stream", [](at::Tensor&, c10::Stream) {});  // memory is never handed out again
  m.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("unfold", at::native::unfold);
}

// Order

void launch(const std::string& name, const std::vector<at::Tensor>& reads, const std::vector<at::Tensor>& writes) {
  Lock held(state().lock);
  Clock& known = state().streams[current];
  raise_to(known, state().ended);
  known[current]++;
  auto report = [&](const char* how) { state().races.insert(name + how); };
  for (const auto& tensor : reads)
    if (Block* block = block_of(tensor)) {
      if (known[block->written.first] < block->written.second) report(": read after write");
      block->read[current] = known[current];
    }
  for (const auto& tensor : writes)
    if (Block* block = block_of(tensor)) {
      if (known[block->written.first] < block->written.second) report(": write after write");
      for (auto [reader, then] : block->read)
        if (known[reader] < then) report(": write after read");
      block->written = {current, known[current]};
      block->read.clear();
    }
}

void ended(int stream) {  // the host has waited for all work given to a stream so far
  Lock held(state().lock);
  raise_to(state().ended, state().streams[stream]);
}

py::object* waiting = new py::object();  // Python's function that waits for a stream

void wait_for(int stream) {
  py::gil_scoped_acquire held;
  (*waiting)(stream);
}

struct Event {
  Clock clock{};
  int stream = 0;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  explicit Guard(c10::DeviceType = TOY) {}
  c10::DeviceType type() const override { return TOY; }
  c10::Device exchangeDevice(c10::Device to) const override { return {TOY, std::exchange(device, to.index())}; }
  c10::Device getDevice() const override { return {TOY, device}; }
  void setDevice(c10::Device to) const override { device = to.index(); }
  void uncheckedSetDevice(c10::Device to) const noexcept override { device = to.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }  // a second one exists only as a number
  static c10::Stream of(int id) { return c10::Stream(c10::Stream::UNSAFE, {TOY, 0}, id); }
  c10::Stream getStream(c10::Device on) const override { return c10::Stream(c10::Stream::UNSAFE, on, current); }
  c10::Stream getDefaultStream(c10::Device) const override { return of(0); }
  c10::Stream getNewStream(c10::Device, int) const override {
    Lock held(state().lock);
    TORCH_CHECK(state().made < STREAMS, "toy: no more streams");
    return of(state().made++);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return c10::Stream(c10::Stream::UNSAFE, stream.device(), std::exchange(current, static_cast<int>(stream.id())));
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
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void synchronizeStream(const c10::Stream& stream) const override { wait_for(static_cast<int>(stream.id())); }
  void synchronizeEvent(void* event) const override {
    if (event) wait_for(static_cast<Event*>(event)->stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  c10::SetAllocator(TOY, &allocator);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  m.def("host", &host);
  m.def("launch", &launch);
  m.def("ended", &ended);
  m.def("on_wait", [](py::object function) { *waiting = function; });
  m.def("stream", [] { return current; });
  m.def("memory", [] {  // bytes held now, and the peak since the last call
    Lock held(state().lock);
    return std::make_pair(state().held, std::exchange(state().peak, state().held));
  });
  m.def("races", [] {
    Lock held(state().lock);
    return std::exchange(state().races, {});
  });
}
