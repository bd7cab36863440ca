// A device cuda:0 for the CPU build of torch: its tensors lie in ordinary memory and every operator runs as the CPU's.
//
// An operator without a kernel for CUDA reaches `compute`, which runs the CPU's kernel on aliases of its arguments. Each
// is told to a listener; so are copies and whatever waits for the device. Nothing here knows Python: see device.py.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <mutex>
#include <set>

namespace {

using at::Tensor;
const c10::Device the_device(c10::DeviceType::CUDA, 0);

// kind: 'o' an operator, 'w' a wait of the host, 'h' a copy to the device, 'd' a copy from it.
using Listener = void (*)(char kind, const char* name);
Listener listener = nullptr;
void tell(char kind, const char* name) {
  if (listener != nullptr) listener(kind, name);
}

// Memory. Pinned memory is ordinary memory whose address is noted.

std::set<const void*> pinned;
std::mutex pinned_mutex;

struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = std::malloc(std::max<size_t>(bytes, 1));
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned.insert(data);
    return {data, data, &remove, c10::Device(c10::DeviceType::CPU)};
  }
  static void remove(void* data) {
    {
      std::lock_guard<std::mutex> lock(pinned_mutex);
      pinned.erase(data);
    }
    std::free(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &remove; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
} pinned_memory;

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes == 0 ? nullptr : std::malloc(bytes);
    return {data, data, &std::free, the_device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
} memory;

Tensor made(c10::Storage storage, caffe2::TypeMeta dtype) {
  return at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype);
}

bool on_device(const Tensor& tensor) { return tensor.defined() && tensor.is_cuda(); }

// The same memory as a tensor of the CPU.
Tensor as_cpu(const Tensor& tensor) {
  if (!on_device(tensor)) return tensor;
  const c10::Storage& own = tensor.storage();
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), own.nbytes(),
      c10::DataPtr(own.mutable_data(), c10::Device(c10::DeviceType::CPU)), c10::GetCPUAllocator(), true);
  Tensor alias = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  alias._set_conj(tensor.is_conj());
  alias._set_neg(tensor.is_neg());
  return alias;
}

void keep(void* context) { delete static_cast<c10::Storage*>(context); }

c10::DataPtr taken_over(const c10::Storage& of_cpu) {
  return {of_cpu.mutable_data(), new c10::Storage(of_cpu), &keep, the_device};
}

// A result of a CPU kernel, as a tensor of the device.
Tensor as_cuda(const Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cuda()) return tensor;
  const c10::Storage& own = tensor.storage();
  Tensor result = made(c10::Storage(c10::Storage::use_byte_size_t(), own.nbytes(), taken_over(own), &memory, true), tensor.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return result;
}

// What a kernel has resized, its argument must be too.
void write_back(const Tensor& alias, const Tensor& tensor) {
  const c10::Storage &theirs = alias.storage(), &ours = tensor.storage();
  if (theirs.data() != ours.data()) {
    ours.set_data_ptr_noswap(taken_over(theirs));
    ours.unsafeGetStorageImpl()->set_nbytes(theirs.nbytes());
  }
  if (alias.sizes() != tensor.sizes() || alias.strides() != tensor.strides())
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
}

// Operators.

// Results whose size the host must know, and values that it reads.
const std::set<std::string> waits = {
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "_unique", "unique_dim",
    "unique_consecutive", "unique_dim_consecutive", "bincount", "repeat_interleave", "histc", "is_nonzero",
};
// Those that take tensors of the CPU: single numbers beside tensors of the device, and indices.
const std::set<std::string> takes_no_numbers = {
    "cat", "stack", "gather", "index_select", "mm", "bmm", "addmm", "baddbmm", "embedding", "scatter", "scatter_add", "scatter_add_", "scatter_",
};

void check_devices(const std::string& name, const std::vector<Tensor>& tensors, const Tensor& first) {
  const bool indexes = name == "index" || name == "_index_put_impl_" || name == "_unsafe_index";
  for (const Tensor& tensor : tensors) {
    if (!tensor.defined() || tensor.is_cuda()) continue;
    if (indexes && first.is_cuda()) {
      if (tensor.dim() > 0 && name == "_index_put_impl_") {  // `index` has copied it before
        tell('h', "an index");
        tell('w', "an index");
      }
    } else {
      TORCH_CHECK(
          tensor.dim() == 0 && takes_no_numbers.count(name) == 0,
          "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (in ", name, ")");
    }
  }
}

template <typename Action>
void for_each_tensor(const c10::IValue& value, Action action) {
  if (value.isTensor()) {
    action(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& tensor : value.toTensorVector()) action(tensor);
  } else if (value.isList()) {  // of optional tensors
    for (const c10::IValue& item : value.toListRef())
      if (item.isTensor()) action(item.toTensor());
  }
}

void compute(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string name = schema.name().substr(schema.name().rfind(':') + 1);
  const size_t count = schema.arguments().size(), start = stack->size() - count;

  std::vector<Tensor> given, aliases;
  std::vector<bool> is_written;
  Tensor first;
  for (size_t place = 0; place < count; place++) {
    const auto& argument = schema.arguments()[place];
    const bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    for_each_tensor((*stack)[start + place], [&](const Tensor& tensor) {
      if (!first.defined()) first = tensor;
      given.push_back(tensor);
      is_written.push_back(written);
    });
  }
  const bool any = std::any_of(given.begin(), given.end(), on_device);
  if (any) check_devices(name, given, first);
  if (any && name == "where")  // its kernel for CUDA copies the numbers among its arguments
    for (const Tensor& tensor : given)
      if (tensor.defined() && !tensor.is_cuda()) {
        tell('h', "a number");
        tell('w', "a number");
      }
  tell('o', name.c_str());
  if (waits.count(name)) tell('w', name.c_str());
  if (name == "_index_put_impl_" && given.size() > 2 && given.back().numel() > 1)
    for (size_t place = 1; place + 1 < given.size(); place++)
      if (given[place].scalar_type() == at::kBool) tell('w', "index_put with a mask");

  // Aliases in place of the arguments, in the same order.
  for (const Tensor& tensor : given) aliases.push_back(as_cpu(tensor));
  size_t next = 0;
  for (size_t place = 0; place < count; place++) {
    c10::IValue& value = (*stack)[start + place];
    if (value.isTensor()) {
      value = aliases[next++];
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (size_t item = value.toTensorVector().size(); item > 0; item--) list.push_back(aliases[next++]);
      value = std::move(list);
    } else if (value.isList() && schema.arguments()[place].type()->isSubtypeOf(*c10::ListType::ofOptionalTensors())) {
      c10::List<std::optional<Tensor>> list;
      for (const c10::IValue& item : value.toListRef())
        list.push_back(item.isTensor() ? std::optional<Tensor>(aliases[next++]) : std::nullopt);
      value = std::move(list);
    } else if (value.isDevice()) {
      value = c10::Device(c10::DeviceType::CPU);
    } else if (schema.arguments()[place].name() == "pin_memory") {
      value = c10::IValue();
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);

  for (size_t place = 0; place < given.size(); place++)
    if (is_written[place] && on_device(given[place])) write_back(aliases[place], given[place]);
  const auto ours = [&](const Tensor& result) {
    for (size_t place = 0; place < given.size(); place++)
      if (result.defined() && result.is_same(aliases[place])) return given[place];
    return as_cuda(result);
  };
  const size_t results = schema.returns().size();
  for (size_t place = stack->size() - results; place < stack->size(); place++) {
    c10::IValue& value = (*stack)[place];
    if (value.isTensor()) {
      value = ours(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(ours(tensor));
      value = std::move(list);
    }
  }
}

Tensor empty_strided(
    c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  const auto meta = c10::scalarTypeToTypeMeta(c10::dtype_or_default(dtype));
  const size_t bytes = at::detail::computeStorageNbytes(sizes, strides, meta.itemsize());
  Tensor result = made(c10::Storage(c10::Storage::use_byte_size_t(), bytes, &memory, true), meta);
  result.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return result;
}

Tensor empty(
    c10::IntArrayRef sizes, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
    std::optional<c10::Device> device, std::optional<bool> pin, std::optional<c10::MemoryFormat> format) {
  Tensor result = empty_strided(sizes, c10::contiguous_strides(sizes), dtype, layout, device, pin);
  if (format.has_value()) result.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return result;
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_cuda() && source.is_cuda()) {
    tell('o', "copy_");
  } else {
    const bool to_device = self.is_cuda();
    const bool is_pinned = (to_device ? source : self).is_pinned();
    tell(to_device ? 'h' : 'd', is_pinned ? (non_blocking ? "pinned, without waiting" : "pinned") : "pageable");
    // A copy from pageable memory waits for the staging; one to it waits for its end.
    if (!(is_pinned && non_blocking)) tell('w', to_device ? "a copy to the device" : "a copy from the device");
  }
  as_cpu(self).copy_(as_cpu(source));
  return self;
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef sizes, std::optional<c10::MemoryFormat> format) {
  Tensor alias = as_cpu(self);
  alias.resize_(sizes, format);
  write_back(alias, self);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  if (strides.data() == nullptr)
    self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, c10::contiguous_strides(sizes), offset);
  else
    self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return self;
}
Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  const int64_t count = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {count}, {});
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
Tensor& set_nothing(Tensor& self) {
  return set_storage(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, &memory, true), 0, {0}, {});
}

// The plain composition of matrix products, whose operators the CPU has: fused attention is another on every device.
int64_t plain_attention(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>, bool) {
  return 0;
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("copy_", &copy_);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("set_", &set_nothing);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("view_as_real", &at::native::view_as_real);
  library.impl("view_as_complex", &at::native::view_as_complex);
  library.impl("_fused_sdp_choice", &plain_attention);
  // One kernel on CUDA too. Of the second kind is whatever takes a list of tensors: otherwise each would be an operator.
  for (const char* name : {"native_layer_norm", "native_layer_norm_backward"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&compute>());
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames())
    if (name.name.rfind("aten::_foreach_", 0) == 0 &&
        !c10::Dispatcher::singleton().findOp(name)->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) {
      const std::string own = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
      library.impl(own.c_str(), torch::CppFunction::makeFromBoxedFunction<&compute>());
    }
}

// What torch asks of a device.

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return the_device; }
  c10::Device getDevice() const override { return the_device; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, the_device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  bool isStreamCapturing(const c10::Stream&) const override { return false; }
  void synchronizeStream(const c10::Stream&) const override { tell('w', "synchronize"); }
  void synchronizeEvent(void*) const override { tell('w', "synchronize"); }
  void synchronizeDevice(const c10::DeviceIndex) const override { tell('w', "synchronize"); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

}  // namespace

namespace at {

struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  Device getDeviceFromPtr(void*) const override { return the_device; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    return pinned.count(data) > 0;
  }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  const Generator& getDefaultGenerator(DeviceIndex) const override { return detail::getDefaultCPUGenerator(); }
  Generator getNewGenerator(DeviceIndex) const override { return detail::createCPUGenerator(); }
};
REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at

extern "C" void listen(Listener given) { listener = given; }
