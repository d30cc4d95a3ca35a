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

template <class Value>
void SplitKV<Value>::operator()(const ExecutionSpace& /*exec*/, const std::vector<Span>& /*spans*/,
                                const AttentionCall<Value>& /*call*/) {
  fail();
}

template <class Value>
void SplitKV<Value>::reserve(const AttentionExtents& /*extents*/) {
  fail();
}

template <class Value>
std::size_t SplitKV<Value>::scratch_bytes(const AttentionExtents& /*extents*/) {
  return 0;
}

template <class Value>
void PanelAttention<Value>::operator()(const ExecutionSpace& /*exec*/, const Span& /*span*/,
                                       const AttentionCall<Value>& /*call*/) {
  fail();
}

template <class Value>
void PanelAttention<Value>::reserve(int /*kv_heads*/, int /*group*/, int /*dim*/,
                                    std::int64_t /*tokens*/) {
  fail();
}

template <class Value>
std::size_t PanelAttention<Value>::scratch_bytes(int /*kv_heads*/, int /*group*/, int /*dim*/,
                                                 std::int64_t /*tokens*/) {
  return 0;
}

template <class Value>
void PanelMass<Value>::operator()(const ExecutionSpace& /*exec*/, const AttentionSpan& /*span*/,
                                  const MassCall<Value>& /*call*/) {
  fail();
}

#define KVZAP_INSTANTIATE(Value)        \
  template class SplitKV<Value>;        \
  template class PanelAttention<Value>; \
  template class PanelMass<Value>;
KVZAP_FOR_EACH_VALUE(KVZAP_INSTANTIATE)
#undef KVZAP_INSTANTIATE

}  // namespace kvzap::attention
