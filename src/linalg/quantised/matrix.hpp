// A matrix of quantised weights in panels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <kvzap/core/types.hpp>
#include <string>
#include <utility>
#include <vector>

#include "linalg/quantised/format.hpp"

namespace kvzap::linalg::quantised {

/// Consecutive outputs of one format. Its panels begin with output `first`; the last one is padded
/// with zeros.
struct Section {
  Panels panels;
  std::int64_t first = 0;
  std::int64_t outputs = 0;

  /// Panels; with `together`: runs of so many of them.
  std::int64_t n_panels(int together = 1) const {
    const std::int64_t of_run = std::int64_t{together} * panel_outputs;
    return (outputs + of_run - 1) / of_run;
  }
};

/// Where the columns of x belong among the inputs of panels; x is zero at the others. Trivial, for
/// kernels of a device.
struct Places {
  const std::int32_t* data = nullptr;  // null: in order

  KOKKOS_INLINE_FUNCTION std::int64_t operator()(std::int64_t column) const {
    return data == nullptr ? column : data[column];
  }
};

/// W (outputs, inputs) of y = x W^T. Consecutive outputs may have different formats, as maps of the
/// same input that a step multiplies at once: all integers or all floats. Copies share the values.
class Matrix {
 public:
  using Data = Kokkos::View<std::uint8_t*, MemorySpace>;
  struct Part {
    const Format* format;
    std::int64_t outputs;
  };

  /// Plans a matrix of `parts` with the half-open ascending `columns` of stored rows. Blocks stay
  /// whole: where a range begins or ends within one, the panels hold the block. Allocates nothing.
  Matrix(const std::vector<Part>& parts,
         const std::vector<std::pair<std::int64_t, std::int64_t>>& columns);
  /// Plans a matrix whose rows are stored in another order than x: column i of x is value places[i]
  /// of a row of `stored` values, which is whole blocks of every format.
  Matrix(const std::vector<Part>& parts, std::vector<std::int32_t> places, std::int64_t stored);

  std::int64_t outputs() const { return m_outputs; }
  /// Columns of x.
  std::int64_t inputs() const { return m_inputs; }
  /// Inputs of panels: a multiple of every format's block.
  std::int64_t padded_inputs() const { return m_padded; }
  const std::vector<Section>& sections() const { return m_sections; }
  /// Whether all inputs of panels are the columns of x, in order.
  bool is_in_order() const { return m_places.empty(); }
  /// For kernels where the panels are; needs place().
  Places places() const { return {m_device_places.data()}; }
  /// Whether codes are floats: all are or none.
  bool has_floats() const {
    return !m_sections.empty() && is_float(m_sections.front().panels.codes);
  }
  /// Whether codes are floats and each output has one scale for all inputs, as find_scales found.
  bool has_scales_of_outputs() const { return m_has_scales_of_outputs; }
  /// Bytes of all panels.
  std::int64_t bytes() const { return m_bytes; }
  /// Panels of all sections; with `together`: runs of so many panels of one section.
  std::int64_t n_panels(int together = 1) const;
  /// Returns the section of a panel counted over all sections, and the panel's number in it; with
  /// `together`: of a run, and its first panel.
  std::pair<const Section*, std::int64_t> panel(std::int64_t number, int together = 1) const;

  /// Uses `data`, of bytes() bytes at a multiple of 64.
  void place(const Data& data);

  /// Packs panel `number` from the stored rows of its outputs, at most 16, to `data` on the host, a
  /// copy of all panels. `rows` points to the blocks of whole rows.
  void pack(std::int64_t number, const std::byte* const* rows, std::uint8_t* data) const;

  /// Reads the scales of all panels, packed to `data` on the host.
  void find_scales(const std::uint8_t* data);

  /// target[i] = W(output, first + i), by columns of x. Hosts only.
  void decode(std::int64_t output, std::int64_t first, std::int64_t count, float* target) const;
  /// Returns the section that holds an output.
  const Section& section_of(std::int64_t output) const;

 private:
  void add_sections(const std::vector<Part>& parts);

  std::int64_t m_outputs = 0, m_inputs = 0, m_padded = 0, m_bytes = 0;
  std::vector<Section> m_sections;
  std::vector<const Format*> m_formats;  // of sections
  std::vector<std::int64_t> m_offsets;   // of sections in the data
  std::vector<std::int32_t> m_places;    // or empty
  Kokkos::View<const std::int32_t*, MemorySpace> m_device_places;
  // Runs of values of stored rows, at multiples of the largest block: first value and count.
  std::vector<std::pair<std::int64_t, std::int64_t>> m_stored;
  Data m_data;
  bool m_has_scales_of_outputs = false;
};

}  // namespace kvzap::linalg::quantised
