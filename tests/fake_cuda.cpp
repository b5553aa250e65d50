// One CUDA device that computes nothing, for tensors that hold nothing (torch's FakeTensorMode).
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

const c10::Device card(c10::DeviceType::CUDA, 0);
const c10::Stream stream(c10::Stream::DEFAULT, card);

struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device getDevice() const override { return card; }
  c10::Device exchangeDevice(c10::Device) const override { return card; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream; }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream; }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Hooks : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};
// in place of those that torch made for itself, which hold no data either
auto* hooks = new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks;
