// Reads the rows of a snapshot's heads as they are in the file, and checks their checksums.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "files/crc32c.hpp"
#include "files/fully.hpp"
#include "io/snapshot_file.hpp"

namespace kvzap::io {

std::string SnapshotFile::name_of_head(int group, int head) const {
  const bool is_context = group >= m_header.n_layers;
  return fmt::format("{}layer {}, head {}", is_context ? "context, " : "",
                     is_context ? group - m_header.n_layers : std::int64_t{group}, head);
}

void SnapshotFile::read(int group, RowKind kind, int head, std::int64_t begin, std::int64_t count,
                        void* target) const {
  if (count == 0) return;
  const RowSet& set = set_of(group, kind);
  const std::int64_t first = m_layout.first_row(group, kind, head) + begin;
  if (set.place >= 0) {
    files::read_fully(m_descriptor.get(), target, count * set.row_bytes,
                      set.place + first * set.row_bytes);
    return;
  }
  const std::int64_t unit = set.chunk_bytes / set.chunk_extent;  // bytes, along the first extent
  std::int64_t at = first * set.row_bytes;
  const std::int64_t end = at + count * set.row_bytes;
  auto chunk = std::lower_bound(set.chunks.begin(), set.chunks.end(),
                                at / set.chunk_bytes * set.chunk_extent,
                                [](const Chunk& a, std::int64_t b) { return a.first < b; });
  for (auto* to = static_cast<char*>(target); at < end; ++chunk) {
    const std::int64_t skipped = at - chunk->first * unit;
    const std::int64_t bytes = std::min(end - at, set.chunk_bytes - skipped);
    to = std::copy_n(inflated(set, *chunk).data() + skipped, bytes, to);
    at += bytes;
  }
}

void SnapshotFile::read_head(int group, RowKind kind, int head, std::int64_t bytes_at_once,
                             std::vector<char>& buffer, const Take& take) const {
  const std::int64_t rows = m_layout.rows(group, kind, head);
  const std::int64_t row_bytes = set_of(group, kind).row_bytes;
  std::int64_t most = std::max<std::int64_t>(1, bytes_at_once / row_bytes);
  if (kind == RowKind::recent_queries && rows > 0) {
    // Read whole query heads.
    const std::int64_t tokens = m_layout.groups[static_cast<std::size_t>(group)].query_tokens;
    most = std::max<std::int64_t>(most / tokens, 1) * tokens;
  }
  most = std::min(most, rows);
  // Unpacking may read some bytes after the last codes (QuantisedPage::bytes).
  constexpr std::int64_t slack = 64;
  if (static_cast<std::int64_t>(buffer.size()) < most * row_bytes + slack) {
    buffer.resize(static_cast<std::size_t>(most * row_bytes + slack));
  }
  std::uint32_t crc = 0;
  try {
    for (std::int64_t begin = 0; begin < rows; begin += most) {
      const std::int64_t count = std::min(most, rows - begin);
      read(group, kind, head, begin, count, buffer.data());
      crc = files::crc32c(buffer.data(), static_cast<std::size_t>(count * row_bytes), crc);
      take(begin, count, buffer.data());
    }
  } catch (const Error& error) {
    throw Error(fmt::format("{}: {}: {}", name_of_head(group, head), name_of(kind), error.what()));
  }
  check_crc(group, kind, head, crc);
}

void SnapshotFile::check_crc(int group, RowKind kind, int head, std::uint32_t found) const {
  const auto& crcs = m_crcs[static_cast<std::size_t>(group)][static_cast<std::size_t>(kind)];
  const std::uint32_t expected = crcs[static_cast<std::size_t>(head)];
  if (found != expected) {
    throw Error(fmt::format("{}: {} are damaged: checksum {:08x}; expected {:08x}",
                            name_of_head(group, head), name_of(kind), found, expected));
  }
}

std::vector<std::int32_t> SnapshotFile::positions(int group, int head,
                                                  std::vector<char>& buffer) const {
  const std::int64_t rows = m_layout.rows(group, RowKind::positions, head);
  std::vector<std::int32_t> positions(static_cast<std::size_t>(rows));
  const std::int64_t tokens =
      group >= m_header.n_layers ? m_layout.context_tokens : m_header.tokens;
  // The newest rows are the ring's. They have no gaps, so their positions are known.
  const std::int64_t in_ring = m_layout.groups[static_cast<std::size_t>(group)].ring_rows;
  constexpr std::int64_t at_once = std::int64_t{1} << 20;
  std::string wrong;
  std::int64_t before = -1;
  read_head(group, RowKind::positions, head, at_once, buffer,
            [&](std::int64_t begin, std::int64_t count, const char* bytes) {
              for (std::int64_t i = 0; i < count; ++i) {
                std::int32_t position = 0;
                std::memcpy(&position, bytes + i * 4, 4);
                const std::int64_t row = begin + i;
                const std::int64_t from_end = rows - row;
                const bool right = from_end <= in_ring
                                       ? position == tokens - from_end
                                       : position > before && position < tokens - in_ring;
                if (!right && wrong.empty()) {
                  wrong = fmt::format(
                      "row {} has position {}, after {}; {} tokens, {} of them in "
                      "the ring",
                      row, position, before, tokens, in_ring);
                }
                before = position;
                positions[static_cast<std::size_t>(row)] = position;
              }
            });
  if (!wrong.empty()) throw Error(fmt::format("{}: {}", name_of_head(group, head), wrong));
  return positions;
}

void SnapshotFile::check_sealed(const std::function<void(const std::string&)>& tell) const {
  const auto attempt = [&](const auto& work) {
    try {
      work();
    } catch (const Error& error) {
      tell(error.what());
    }
  };
  attempt([&] {
    const auto seal = read_seal(m_descriptor.get());
    if (!seal || seal->crc != m_seal.crc) throw Error("it has changed since it was opened");
  });
  for (const SealedExtent& extent : m_seal.extents) {
    attempt([&] { check_extent(m_descriptor.get(), extent); });
  }
}

}  // namespace kvzap::io
