// Replaces the device kernels in builds where nothing can select them: see
// KVZAP_HAVE_DEVICE_KERNELS.
#include "attention/device/page_choice.hpp"
#include "attention/device/panel_mass.hpp"
#include "attention/device/panels.hpp"
#include "attention/device/split_kv.hpp"

namespace kvzap::attention {
namespace {

[[noreturn]] void fail() {
  throw Error(
      "this build has no attention kernels of devices: its Kokkos runs on the host, and it was "
      "configured with KVZAP_DEVICE_KERNELS_ON_HOST=OFF");
}

}  // namespace

void SplitKV::operator()(const ExecutionSpace&, const std::vector<Span>&, const AttentionCall&) {
  fail();
}
void SplitKV::reserve(const AttentionExtents&) { fail(); }
std::size_t SplitKV::scratch_bytes(const AttentionExtents&) { return 0; }
bool SplitKV::can_plan(const AttentionExtents&) { return false; }
void SplitKV::plan_calls(std::size_t) { fail(); }
void SplitKV::plan(std::size_t, const std::vector<Span>&, const AttentionCall&) { fail(); }
void SplitKV::copy_plans(const ExecutionSpace&) { fail(); }
void SplitKV::run_planned(const ExecutionSpace&, std::size_t) { fail(); }
void SplitKV::add_shape(std::vector<std::int64_t>&) const { fail(); }

const std::vector<AttentionSpan>& DevicePageChoice::operator()(const ExecutionSpace&,
                                                               const std::vector<AttentionSpan>&,
                                                               const AttentionCall&) {
  fail();
}
void DevicePageChoice::reserve(const AttentionExtents&) { fail(); }
std::size_t DevicePageChoice::scratch_bytes(const AttentionExtents&) { return 0; }
void DevicePageChoice::plan_calls(std::size_t) { fail(); }
const std::vector<AttentionSpan>& DevicePageChoice::plan(std::size_t,
                                                         const std::vector<AttentionSpan>&,
                                                         const AttentionCall&) {
  fail();
}
void DevicePageChoice::copy_plans(const ExecutionSpace&) { fail(); }
void DevicePageChoice::run_planned(const ExecutionSpace&, std::size_t) const { fail(); }
void DevicePageChoice::add_shape(std::vector<std::int64_t>&) const { fail(); }

void PanelAttention::operator()(const ExecutionSpace&, const Span&, const AttentionCall&) {
  fail();
}
void PanelAttention::reserve(DType, const AttentionExtents&) { fail(); }
std::size_t PanelAttention::scratch_bytes(DType, const AttentionExtents&) { return 0; }

void PanelMass::operator()(const ExecutionSpace&, const AttentionSpan&, const MassCall&) { fail(); }

}  // namespace kvzap::attention
