#include <fmt/format.h>

#include <kvzap/lab/pairs.hpp>

#include "io/hdf5_file.hpp"
#include "train/pairs_layout.hpp"

namespace kvzap {
namespace {

namespace fs = std::filesystem;
using io::checked_hdf5;
using io::Hdf5Handle;

class Hdf5Pairs final : public PairsFile {
 public:
  explicit Hdf5Pairs(fs::path file) : m_path(std::move(file)) {
    const io::QuietHdf5 quiet;
    m_file = io::open_to_read(m_path);
    m_info =
        train::read_pairs_layout(m_file, static_cast<std::int64_t>(fs::file_size(m_path))).info;
    m_type = io::type_in_memory(m_info.dtype);
  }

  const PairsInfo& info() const override { return m_info; }

  void read(int layer, std::int64_t begin, std::int64_t count, void* hidden,
            float* scores) const override {
    check_range(begin, count);
    if (layer < 0 || layer >= m_info.layers) {
      throw Error(fmt::format("pairs file {}: there is no layer {}; expected 0 to {}",
                              m_path.string(), layer, m_info.layers - 1));
    }
    if (hidden) read(layer, "hidden", begin, count, m_info.hidden_size, m_type, hidden);
    if (scores) read(layer, "scores", begin, count, m_info.kv_heads, H5T_NATIVE_FLOAT, scores);
  }

  std::vector<std::int64_t> positions(std::int64_t begin, std::int64_t count) const override {
    check_range(begin, count);
    const io::QuietHdf5 quiet;
    return io::about_file(train::pairs_kind, m_path,
                          [&] { return train::read_integers(m_file, "/positions", begin, count); });
  }

 private:
  void check_range(std::int64_t begin, std::int64_t count) const {
    if (begin < 0 || count < 0 || begin > m_info.pairs || count > m_info.pairs - begin) {
      throw Error(fmt::format("pairs file {}: there are no {} pairs from {} on; it has {}",
                              m_path.string(), count, begin, m_info.pairs));
    }
  }

  // Keeps the data set of the last read open. Its chunk cache has the chunk in which the next read
  // is likely to begin.
  struct OpenDataSet {
    int layer = -1;
    Hdf5Handle handle;
  };

  static Hdf5Handle access_for_reading() {
    Hdf5Handle access = io::property_list(H5P_DATASET_ACCESS);
    constexpr std::size_t slots = 521, bytes = std::size_t{16} << 20;
    checked_hdf5(H5Pset_chunk_cache(access, slots, bytes, 1), "H5Pset_chunk_cache");
    return access;
  }

  void read(int layer, const char* kind, std::int64_t begin, std::int64_t rows,
            std::int64_t columns, hid_t type, void* target) const {
    if (rows == 0) return;
    const io::QuietHdf5 quiet;
    const std::string name = train::pairs_data_set(layer, kind);
    const auto work = [&] {
      OpenDataSet& open = m_open[kind];
      if (open.layer != layer) {
        open = {};
        const Hdf5Handle access = access_for_reading();
        open = {layer, Hdf5Handle(H5Dopen2(m_file, name.c_str(), access), H5Dclose, "H5Dopen2")};
      }
      io::read_part(open.handle, type, {static_cast<hsize_t>(begin), 0},
                    {static_cast<hsize_t>(rows), static_cast<hsize_t>(columns)}, target);
    };
    io::about_file(train::pairs_kind, m_path, [&] {
      io::about(fmt::format("'{}', pairs {} to {}", name, begin, begin + rows - 1), work);
    });
  }

  fs::path m_path;
  Hdf5Handle m_file;
  Hdf5Handle m_type;
  PairsInfo m_info;
  mutable std::map<std::string, OpenDataSet> m_open;
};

}  // namespace

std::unique_ptr<PairsFile> PairsFile::open(const fs::path& file) {
  return io::about_file(train::pairs_kind, file, [&]() -> std::unique_ptr<PairsFile> {
    const fs::file_status status = fs::status(file);
    if (!fs::exists(status)) throw Error("there is no such file");
    if (!fs::is_regular_file(status)) throw Error("it is not a regular file");
    return std::make_unique<Hdf5Pairs>(file);
  });
}

}  // namespace kvzap
