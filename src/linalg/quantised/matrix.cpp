#include "linalg/quantised/matrix.hpp"

#include <algorithm>
#include <cstring>

// Within a block, offsets fit an int.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)

namespace kvzap::linalg::quantised {
namespace {

std::uint32_t quad_at(const std::uint8_t* codes) {
  std::uint32_t quad = 0;
  std::memcpy(&quad, codes, sizeof(quad));
  return quad;
}

void put(std::uint8_t* target, std::uint32_t quad) { std::memcpy(target, &quad, sizeof(quad)); }

/// Writes the codes of one output of a group.
void pack_codes(CodeKind kind, const std::uint8_t* codes, int lane, std::uint8_t* group) {
  if (is_float(kind)) {
    for (int i = 0; i < group_inputs; ++i) group[i * panel_outputs + lane] = codes[i];
    return;
  }
  std::uint8_t* target = group + 4 * lane;
  if (kind == CodeKind::bytes) {
    for (int quad = 0; quad < group_quads; ++quad) {
      put(target + quad * quad_bytes, quad_at(codes + 4 * quad));
    }
    return;
  }
  if (high_bits(kind) == 1) {
    std::uint32_t high = 0;
    for (int quad = 0; quad < group_quads; ++quad) {
      high |= (quad_at(codes + 4 * quad) >> 4 & 0x01010101u) << quad;
    }
    put(target, high);
    target += quad_bytes;
  } else if (high_bits(kind) == 2) {
    for (int plane = 0; plane < 2; ++plane) {
      std::uint32_t high = 0;
      for (int quad = 0; quad < 4; ++quad) {
        high |= (quad_at(codes + 16 * plane + 4 * quad) >> 4 & 0x03030303u) << 2 * quad;
      }
      put(target + plane * quad_bytes, high);
    }
    target += 2 * quad_bytes;
  }
  for (int quad = 0; quad < 4; ++quad) {
    const std::uint32_t low = quad_at(codes + 4 * quad) & 0x0f0f0f0fu;
    const std::uint32_t high = quad_at(codes + 16 + 4 * quad) & 0x0f0f0f0fu;
    put(target + quad * quad_bytes, low | high << 4);
  }
}

void pack_scales(ScaleKind kind, const SplitBlock& parts, int lane, std::uint8_t* target) {
  if (kind == ScaleKind::exponent) {
    target[lane] = static_cast<std::uint8_t>(parts.scale);
    return;
  }
  if (kind == ScaleKind::single) {
    std::memcpy(target + 4 * lane, &parts.scale, 2);
    std::memcpy(target + 4 * lane + 2, &parts.minimum, 2);
    return;
  }
  std::memcpy(target + 2 * lane, &parts.scale, 2);
  if (kind == ScaleKind::half_zero) {
    target[2 * panel_outputs + lane] = static_cast<std::uint8_t>(parts.minimum);
  }
  if (kind == ScaleKind::half_minimum || kind == ScaleKind::group_minimum) {
    std::memcpy(target + 2 * (panel_outputs + lane), &parts.minimum, 2);
  }
  if (kind == ScaleKind::group_minimum) {
    for (int i = 0; i < 8; ++i) {
      target[(4 + i) * panel_outputs + lane] = parts.group_scales[i];
      target[(12 + i) * panel_outputs + lane] = parts.group_minima[i];
    }
  } else if (kind == ScaleKind::group_of_16) {
    for (int i = 0; i < 16; ++i) {
      target[(2 + i) * panel_outputs + lane] = parts.group_scales[i];
    }
  }
}

}  // namespace

Matrix::Matrix(const std::vector<Part>& parts,
               const std::vector<std::pair<std::int64_t, std::int64_t>>& columns) {
  std::int64_t block = group_inputs;
  for (const Part& part : parts) block = std::max<std::int64_t>(block, part.format->values);
  std::vector<std::pair<std::int64_t, std::int64_t>> ranges;
  for (const auto& [begin, end] : columns) {
    if (!ranges.empty() && ranges.back().second == begin) {
      ranges.back().second = end;
    } else if (begin < end) {
      ranges.emplace_back(begin, end);
    }
  }
  for (const auto& [begin, end] : ranges) {
    const std::int64_t first = begin / block * block;
    const std::int64_t last = (end + block - 1) / block * block;
    m_stored.emplace_back(first, last - first);
    m_inputs += end - begin;
    m_padded += last - first;
  }
  if (m_inputs < m_padded) {
    std::int64_t place = 0;  // of the block in which a range begins
    for (std::size_t r = 0; r < ranges.size(); place += m_stored[r].second, ++r) {
      for (std::int64_t column = ranges[r].first; column < ranges[r].second; ++column) {
        m_places.push_back(static_cast<std::int32_t>(place + column - m_stored[r].first));
      }
    }
  }
  add_sections(parts);
}

Matrix::Matrix(const std::vector<Part>& parts, std::vector<std::int32_t> places,
               std::int64_t stored)
    : m_inputs(static_cast<std::int64_t>(places.size())),
      m_padded(stored),
      m_places(std::move(places)),
      m_stored({{0, stored}}) {
  add_sections(parts);
}

void Matrix::add_sections(const std::vector<Part>& parts) {
  for (const Part& part : parts) {
    if (part.outputs == 0) continue;
    Section section;
    section.first = m_outputs;
    section.outputs = part.outputs;
    section.panels.inputs = m_padded;
    section.panels.block = part.format->values;
    section.panels.codes = part.format->codes;
    section.panels.scales = part.format->scales;
    if (part.format->table != nullptr) std::copy_n(part.format->table, 16, section.panels.table);
    m_offsets.push_back(m_bytes);
    m_bytes += section.n_panels() * section.panels.panel_bytes();
    m_outputs += part.outputs;
    m_sections.push_back(section);
    m_formats.push_back(part.format);
  }
}

void Matrix::place(const Data& data) {
  m_data = data;
  if (!m_places.empty()) {
    const Kokkos::View<std::int32_t*, MemorySpace> places("kvzap::weights::places",
                                                          m_places.size());
    Kokkos::deep_copy(places, Kokkos::View<const std::int32_t*, Kokkos::HostSpace>(
                                  m_places.data(), m_places.size()));
    m_device_places = places;
  }
  for (std::size_t s = 0; s < m_sections.size(); ++s) {
    m_sections[s].panels.data = m_data.data() + m_offsets[s];
  }
}

std::int64_t Matrix::n_panels(int together) const {
  std::int64_t count = 0;
  for (const Section& section : m_sections) count += section.n_panels(together);
  return count;
}

std::pair<const Section*, std::int64_t> Matrix::panel(std::int64_t number, int together) const {
  const Section* section = m_sections.data();
  for (; number >= section->n_panels(together); ++section) number -= section->n_panels(together);
  return {section, number * together};
}

void Matrix::pack(std::int64_t number, const std::byte* const* rows, std::uint8_t* data) const {
  const auto [section, own] = panel(number);
  const std::size_t s = section - m_sections.data();
  const Format& format = *m_formats[s];
  const Panels& panels = section->panels;
  std::uint8_t* const scales = data + m_offsets[s] + own * panels.panel_bytes();
  std::uint8_t* const codes = scales + panels.scales_size();
  const int outputs = static_cast<int>(
      std::min<std::int64_t>(panel_outputs, section->outputs - own * panel_outputs));
  if (outputs < panel_outputs) std::memset(scales, 0, panels.panel_bytes());
  const int groups = format.values / group_inputs;
  SplitBlock parts;
  std::int64_t block = 0;  // of the panel
  for (const auto& [first, count] : m_stored) {
    const std::int64_t stored = first / format.values;
    const std::int64_t n_blocks = count / format.values;
    for (std::int64_t i = 0; i < n_blocks; ++i, ++block) {
      for (int lane = 0; lane < outputs; ++lane) {
        const auto* source = reinterpret_cast<const std::uint8_t*>(rows[lane]);
        format.split(source + (stored + i) * format.bytes, parts);
        pack_scales(format.scales, parts, lane, scales + block * scale_bytes(format.scales));
        for (int group = 0; group < groups; ++group) {
          pack_codes(format.codes, parts.codes.data() + group * group_inputs, lane,
                     codes + (block * groups + group) * code_bytes(format.codes));
        }
      }
    }
  }
  // The scales end at a multiple of 64 bytes.
  std::uint8_t* const end = scales + block * scale_bytes(format.scales);
  std::memset(end, 0, codes - end);
}

void Matrix::find_scales(const std::uint8_t* data) {
  m_has_scales_of_outputs = has_floats();
  for (std::size_t s = 0; s < m_sections.size() && m_has_scales_of_outputs; ++s) {
    const Panels& panels = m_sections[s].panels;
    const std::int64_t size = scale_bytes(panels.scales);
    for (std::int64_t i = 0; i < m_sections[s].n_panels() && m_has_scales_of_outputs; ++i) {
      const std::uint8_t* const scales = data + m_offsets[s] + i * panels.panel_bytes();
      for (std::int64_t block = 1; block < panels.inputs / panels.block; ++block) {
        if (std::memcmp(scales, scales + block * size, size) != 0) m_has_scales_of_outputs = false;
      }
    }
  }
}

const Section& Matrix::section_of(std::int64_t output) const {
  std::size_t s = 0;
  while (output >= m_sections[s].first + m_sections[s].outputs) ++s;
  return m_sections[s];
}

void Matrix::decode(std::int64_t output, std::int64_t first, std::int64_t count,
                    float* target) const {
  const Section& section = section_of(output);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t input = m_places.empty() ? first + i : m_places[first + i];
    target[i] = value_at(section.panels, output - section.first, input);
  }
}

}  // namespace kvzap::linalg::quantised

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
