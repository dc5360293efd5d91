// A device guard for "cuda" that does nothing, for a torch without CUDA: fake tensors of that device reach their fake
// kernels, which a missing guard would keep them from.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

struct FakeCudaGuard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::DeviceIndex deviceCount() const noexcept override { return 8; }
};

}  // namespace

C10_REGISTER_GUARD_IMPL(CUDA, FakeCudaGuard);
