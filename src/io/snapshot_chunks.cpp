// Compressed rows of a snapshot: finds their chunks in the file and inflates them.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <zlib.h>

#include <algorithm>
#include <new>

#include "files/crc32c.hpp"
#include "files/fully.hpp"
#include "io/container.hpp"
#include "io/snapshot_file.hpp"

namespace kvzap::io {

namespace {

constexpr std::int64_t most_chunk_bytes = std::int64_t{1} << 30;

}  // namespace

// Finds the chunks of a compressed data set. Accepts exactly the chunks that the extents require,
// each of whole rows (whole query heads).
void SnapshotFile::find_chunks(RowSet& set, const OpenSet& open, const std::string& path) const {
#if H5_VERSION_GE(1, 10, 5)
  const std::vector<std::int64_t>& chunk = open.chunk;
  const std::vector<H5Z_filter_t>& filters = open.filters;
  const bool shuffles = !filters.empty() && filters.front() == H5Z_FILTER_SHUFFLE;
  const bool deflates = filters.size() > (shuffles ? 1 : 0);
  for (std::size_t i = shuffles ? 1 : 0; i < filters.size(); ++i) {
    if (filters[i] == H5Z_FILTER_DEFLATE && i + 1 == filters.size()) continue;
    throw Error(fmt::format("data set '{}' has filter {}; expected shuffle and deflate", path,
                            static_cast<int>(filters[i])));
  }
  const std::size_t rank = set.extents.size();
  std::int64_t expected = 1;
  std::int64_t chunk_bytes = set.element_bytes;
  bool is_whole = true;
  for (std::size_t i = 0; i < rank; ++i) {
    const std::int64_t extent = chunk[i];
    if (extent < 1 || extent > std::max<std::int64_t>(set.extents[i], 1)) {
      throw Error(fmt::format("data set '{}' has chunks of ({}); its extents are ({})", path,
                              fmt::join(chunk, ", "), fmt::join(set.extents, ", ")));
    }
    expected = product(expected, (set.extents[i] + extent - 1) / extent);
    chunk_bytes = product(chunk_bytes, extent);
    is_whole = is_whole && (i == 0 || extent == set.extents[i]);
  }
  if (chunk_bytes > most_chunk_bytes || !is_whole) {
    throw Error(
        fmt::format("data set '{}' has chunks of ({}), {} bytes; expected whole rows, at "
                    "most {} bytes",
                    path, fmt::join(chunk, ", "), chunk_bytes, most_chunk_bytes));
  }
  const Hdf5Handle space(H5Dget_space(open.handle), H5Sclose, "H5Dget_space");
  hsize_t count = 0;
  checked_hdf5(H5Dget_num_chunks(open.handle, space, &count), "H5Dget_num_chunks");
  if (count != static_cast<hsize_t>(expected)) {
    throw Error(fmt::format("data set '{}' has {} chunks; expected {}", path, count, expected));
  }
  set.chunk_extent = chunk[0];
  set.chunk_bytes = chunk_bytes;
  // Looks up chunks by coordinate. HDF5 would search for a chunk number from the first chunk on.
  std::vector<hsize_t> offset(rank, 0);
  for (hsize_t i = 0; i < count; ++i) {
    unsigned skipped = 0;
    haddr_t place = HADDR_UNDEF;
    hsize_t bytes = 0;
    checked_hdf5(H5Dget_chunk_info_by_coord(open.handle, offset.data(), &skipped, &place, &bytes),
                 "H5Dget_chunk_info_by_coord");
    const bool in_file = place < static_cast<haddr_t>(m_bytes) &&
                         bytes <= static_cast<hsize_t>(m_bytes) - static_cast<hsize_t>(place);
    // HDF5 stores a chunk unpacked if deflate would make it larger.
    const bool as_is =
        !deflates || (skipped & (1U << static_cast<unsigned>(filters.size() - 1))) != 0;
    if (!in_file || bytes == 0 || (as_is && bytes != static_cast<hsize_t>(chunk_bytes)) ||
        chunk_bytes / most_gain > static_cast<std::int64_t>(bytes)) {
      throw Error(
          fmt::format("data set '{}': chunk {} has {} bytes from {} on, for {}; the file "
                      "has {}",
                      path, i, bytes, place, chunk_bytes, m_bytes));
    }
    Chunk found{static_cast<std::int64_t>(offset[0]),
                {static_cast<std::int64_t>(place), static_cast<std::int64_t>(bytes), {}},
                !as_is,
                shuffles && (skipped & 1U) == 0};
    const auto& extents = m_seal.extents;
    const auto extent =
        std::lower_bound(extents.begin(), extents.end(), found.extent.begin,
                         [](const SealedExtent& a, std::int64_t begin) { return a.begin < begin; });
    if (extent != extents.end() && extent->begin == found.extent.begin &&
        extent->bytes == found.extent.bytes) {
      found.extent.crc = extent->crc;  // without one, the seal itself covers the chunk
    }
    set.chunks.push_back(found);
    for (std::size_t d = rank; d-- > 0;) {
      offset[d] += static_cast<hsize_t>(chunk[d]);
      if (offset[d] < static_cast<hsize_t>(set.extents[d])) break;
      offset[d] = 0;
    }
  }
#else
  (void)set;
  (void)open;
  throw Error(fmt::format("data set '{}' is compressed, which takes HDF5 1.10.5 or newer", path));
#endif
}

void SnapshotFile::read_chunk(const Chunk& chunk, std::vector<char>& stored) const {
  stored.resize(static_cast<std::size_t>(chunk.extent.bytes));
  files::read_fully(m_descriptor.get(), stored.data(), chunk.extent.bytes, chunk.extent.begin);
  if (chunk.extent.crc) expect_crc(chunk.extent, files::crc32c(stored.data(), stored.size()));
}

// Undoes shuffle and deflate here. HDF5 assumes that a chunk inflates to the size that its extents
// imply, and reads past the end of a shorter one.
const std::vector<char>& SnapshotFile::inflated(const RowSet& set, const Chunk& chunk) const {
  if (m_inflated_of == &chunk) return m_inflated;
  m_inflated_of = nullptr;
  read_chunk(chunk, m_stored);
  if (chunk.is_deflated) {
    m_inflated.resize(static_cast<std::size_t>(set.chunk_bytes));
    auto bytes = static_cast<uLongf>(m_inflated.size());
    const int code =
        ::uncompress(static_cast<Bytef*>(static_cast<void*>(m_inflated.data())), &bytes,
                     static_cast<const Bytef*>(static_cast<const void*>(m_stored.data())),
                     static_cast<uLong>(m_stored.size()));
    if (code == Z_MEM_ERROR) throw std::bad_alloc();
    if (code != Z_OK || bytes != m_inflated.size()) {
      throw Error(fmt::format("the compressed chunk at byte {} does not inflate to {} bytes",
                              chunk.extent.begin, set.chunk_bytes));
    }
  } else {
    m_inflated = m_stored;
  }
  if (chunk.is_shuffled && set.element_bytes > 1) {
    // The file has the first bytes of all elements, then their second bytes, and so on.
    m_shuffled = m_inflated;
    const auto width = static_cast<std::size_t>(set.element_bytes);
    const std::size_t count = m_shuffled.size() / width;
    for (std::size_t byte = 0; byte < width; ++byte) {
      const char* const from = m_shuffled.data() + byte * count;
      char* const to = m_inflated.data() + byte;
      for (std::size_t i = 0; i < count; ++i) to[i * width] = from[i];
    }
  }
  m_inflated_of = &chunk;
  return m_inflated;
}

}  // namespace kvzap::io
