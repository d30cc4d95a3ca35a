// Replaces the device kernels in builds where nothing can select them: see
// KVZAP_HAVE_DEVICE_KERNELS.
#include "attention/device/panel_mass.hpp"
#include "attention/device/panels.hpp"
#include "attention/device/split_kv.hpp"
#include "base/value_types.hpp"

namespace kvzap::attention {
namespace {

[[noreturn]] void fail() {
  throw Error(
      "this build has no attention kernels of devices: its Kokkos runs on the host, and it was "
      "configured with KVZAP_DEVICE_KERNELS_ON_HOST=OFF");
}

}  // namespace

template <class Value, PageOrder order>
void SplitKV<Value, order>::operator()(const ExecutionSpace& /*exec*/,
                                       const std::vector<Span>& /*spans*/,
                                       const AttentionCall<Value, order>& /*call*/) {
  fail();
}

template <class Value, PageOrder order>
void SplitKV<Value, order>::reserve(const AttentionExtents& /*extents*/) {
  fail();
}

template <class Value, PageOrder order>
std::size_t SplitKV<Value, order>::scratch_bytes(const AttentionExtents& /*extents*/) {
  return 0;
}

template <class Value, PageOrder order>
void PanelAttention<Value, order>::operator()(const ExecutionSpace& /*exec*/, const Span& /*span*/,
                                              const AttentionCall<Value, order>& /*call*/) {
  fail();
}

template <class Value, PageOrder order>
void PanelAttention<Value, order>::reserve(int /*kv_heads*/, int /*group*/, int /*dim*/,
                                           std::int64_t /*tokens*/) {
  fail();
}

template <class Value, PageOrder order>
std::size_t PanelAttention<Value, order>::scratch_bytes(int /*kv_heads*/, int /*group*/,
                                                        int /*dim*/, std::int64_t /*tokens*/) {
  return 0;
}

template <class Value, PageOrder order>
void PanelMass<Value, order>::operator()(const ExecutionSpace& /*exec*/,
                                         const AttentionSpan<Value, order>& /*span*/,
                                         const MassCall<Value, order>& /*call*/) {
  fail();
}

#define KVZAP_INSTANTIATE(Value, order)        \
  template class SplitKV<Value, order>;        \
  template class PanelAttention<Value, order>; \
  template class PanelMass<Value, order>;
KVZAP_FOR_EACH_CACHE(KVZAP_INSTANTIATE)
#undef KVZAP_INSTANTIATE

}  // namespace kvzap::attention
