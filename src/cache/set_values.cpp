// New values for rows of a sequence that stay where they are.
#include "base/host_threads.hpp"
#include "base/machine.hpp"
#include "cache/cache_impl.hpp"
#include "cache/layer_rows.hpp"
#include "cache/row_access.hpp"

namespace kvzap::cache {
namespace {

/// Writes value i of `values`, (row, dim), to row numbers(i) of a head.
template <class Value>
struct WriteValue {
  LayerRows rows;
  std::int64_t head;
  Kokkos::View<const std::int64_t*, MemorySpace> numbers;
  Kokkos::View<const float**, Kokkos::LayoutRight, MemorySpace> values;

  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    const std::int64_t row = numbers(i);
    const float* const value = values.data() + i * rows.layer.head_dim;
    if (rows.layer.is_packed(head, row)) {
      const QuantisedPlace to = rows.quantised(head, row, true);
      linalg::pack_row_from(rows.layer.format.values, value, rows.layer.head_dim, to.codes,
                            to.scale);
      return;
    }
    auto* const to = const_cast<Value*>(rows.template wide<Value>(head, row).values);
    for (int d = 0; d < rows.layer.head_dim; ++d) to[d] = Value(value[d]);
  }
};

}  // namespace

void RowAccess::set_values(
    const ExecutionSpace& exec, SequenceId id, int layer_index, int head,
    const Kokkos::View<const std::int64_t*, MemorySpace>& rows,
    const Kokkos::View<const float**, Kokkos::LayoutRight, MemorySpace>& values) {
  m_store.check_pages(layer_index, "set_values");
  m_store.settle(id);
  Sequence& sequence = m_store.sequence_at(id);
  m_store.checked_head(layer_index, head);
  if (sequence.step >= 0 && m_store.step_states[sequence.step].tokens[layer_index] > 0) {
    throw Error(fmt::format("cache set_values: sequence {} is in a step that began with rows", id));
  }
  if (m_store.shape.format.values_are_keys) {
    throw Error("cache set_values: the value of a row is its key");
  }
  const auto count = static_cast<std::int64_t>(rows.extent(0));
  const int dim = m_store.shape.dim(layer_index);
  if (static_cast<std::int64_t>(values.extent(0)) < count ||
      static_cast<int>(values.extent(1)) != dim) {
    throw Error(fmt::format(
        "cache set_values: values are ({}, {}); expected (at least {}, {}) = (row, dim)",
        values.extent(0), values.extent(1), count, dim));
  }
  if (count == 0) return;
  m_store.enter(exec, sequence);
  if (sequence.step < 0) {
    m_store.own_pages(exec, sequence, layer_index);
    sequence.checkpoints.clear();
  }
  with_value_type(m_store.dtype, [&](auto zero) {
    const WriteValue<decltype(zero)> write{LayerRows::of(m_store, id, layer_index), head, rows,
                                           values};
    if (base::machine().on_host()) {
      base::host_for("kvzap::set_values", count, dim, write);
    } else {
      Kokkos::parallel_for("kvzap::set_values", Range(exec, 0, count), write);
    }
  });
}

}  // namespace kvzap::cache
