#include "pairs_layout.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "files/json_field.hpp"
#include "files/json_file.hpp"
#include "io/container.hpp"

namespace kvzap::train {
namespace {

constexpr const char* version_name = "kvzap_pairs_version";

// Limits of valid files; larger products would not fit 64 bits.
constexpr std::int64_t most_hidden = std::int64_t{1} << 20;
constexpr std::int64_t most_layers = std::int64_t{1} << 12;
constexpr std::int64_t most_heads = std::int64_t{1} << 12;
constexpr std::int64_t most_pairs = std::int64_t{1} << 40;
// HDF5 holds whole chunks in memory.
constexpr std::int64_t most_chunk_bytes = std::int64_t{256} << 20;
// Deflate's best ratio is 1032 to 1.
constexpr std::int64_t most_quantised = 2048;

// Lists the root's attributes, except the version, in the file's order.
template <class Layout, class Visit>
void list_attributes(Layout& layout, Visit& visit) {
  auto& info = layout.info;
  visit("model", info.model);
  visit("dtype", info.dtype, dtype_from_name);
  visit("hidden_size", info.hidden_size, 1, most_hidden);
  visit("layers", info.layers, 1, most_layers);
  visit("kv_heads", info.kv_heads, 1, most_heads);
  visit("planned_pairs", info.planned_pairs, 1, most_pairs);
  visit("planned_texts", info.planned_texts, 1, info.planned_pairs);
  visit("command", layout.command);
  visit("pairs", info.pairs, 0, info.planned_pairs);
  visit("texts", info.texts, 0, info.planned_texts);
  visit("written", layout.written, info.pairs, info.planned_pairs);
  visit("metadata_bytes", layout.metadata_bytes);
}

// Opens a data set. It may have more rows than the plan: a command that was shortened fills fewer
// than its file has. Other programs may have packed it with filters of their own.
io::OpenSet open_data_set(hid_t file, const std::string& name, const io::ExpectedType& type,
                          std::string_view type_name, const std::vector<std::int64_t>& extents) {
  io::OpenSet set = io::open_set(file, name, type, type_name, extents, io::Rows::at_least);
  for (const H5Z_filter_t filter : set.filters) {
    if (H5Zfilter_avail(filter) <= 0) {
      throw Error(fmt::format("'{}' is packed with HDF5 filter {}, which this HDF5 does not have",
                              name, static_cast<int>(filter)));
    }
  }
  return set;
}

// Opens a data set of pairs. Returns the extents of its chunks, or an empty vector if it has none.
std::vector<std::int64_t> check_pairs(hid_t file, const std::string& name, DType dtype,
                                      const std::vector<std::int64_t>& extents) {
  const io::Hdf5Handle type = io::type_in_file(dtype);
  std::vector<std::int64_t> chunk = open_data_set(file, name, type, name_of(dtype), extents).chunk;
  if (!chunk.empty() && io::product(chunk[0], chunk[1]) >
                            most_chunk_bytes / static_cast<std::int64_t>(size_of(dtype))) {
    throw Error(fmt::format("'{}' has chunks of {} x {} values; expected at most {} bytes", name,
                            chunk[0], chunk[1], most_chunk_bytes));
  }
  return chunk;
}

std::map<std::string, std::string> parse_command(const std::string& text) {
  const std::string where = "attribute 'command'";
  const nlohmann::json json = files::parse_json_object(text, where);
  const files::JsonField fields(json, where);
  std::map<std::string, std::string> command;
  for (const auto& [name, value] : json.items()) command[name] = fields.named(value, name).string();
  return command;
}

std::vector<std::int64_t> text_integers(hid_t file, const std::string& name, std::int64_t count) {
  open_data_set(file, name, H5T_INTEGER, "integers", {count});
  return read_integers(file, name, 0, count);
}

std::vector<std::string> text_subsets(hid_t file, std::int64_t count, std::int64_t bytes_at_most) {
  const std::string name = "/texts/subset";
  const io::OpenSet set = open_data_set(file, name, H5T_STRING, "texts of one length", {count});
  const io::Hdf5Handle type(H5Dget_type(set.handle), H5Tclose, "H5Dget_type");
  if (io::checked_hdf5(H5Tis_variable_str(type), "H5Tis_variable_str") > 0) {
    throw Error(fmt::format("'{}' has texts of any length; expected texts of one length", name));
  }
  const std::size_t size = H5Tget_size(type);
  if (static_cast<std::int64_t>(size) > bytes_at_most / count) {
    throw Error(fmt::format("'{}' has texts of {} bytes, more than fit the file", name, size));
  }
  std::vector<char> all(size * static_cast<std::size_t>(count));
  io::read_part(set.handle, type, {0}, {static_cast<hsize_t>(count)}, all.data());
  std::vector<std::string> subsets;
  for (std::int64_t i = 0; i < count; ++i) {
    const char* const begin = all.data() + static_cast<std::size_t>(i) * size;
    const std::string text(begin, size);
    subsets.push_back(text.substr(0, text.find('\0')));
  }
  return subsets;
}

}  // namespace

std::string pairs_data_set(int layer, const char* name) {
  return fmt::format("/layers/{}/{}", layer, name);
}

std::vector<std::int64_t> read_integers(hid_t file, const std::string& name, std::int64_t begin,
                                        std::int64_t count) {
  std::vector<std::int64_t> values(static_cast<std::size_t>(count));
  if (count == 0) return values;
  const io::Hdf5Handle data_set(H5Dopen2(file, name.c_str(), H5P_DEFAULT), H5Dclose, "H5Dopen2");
  io::about(fmt::format("'{}'", name), [&] {
    io::read_part(data_set, H5T_NATIVE_INT64, {static_cast<hsize_t>(begin)},
                  {static_cast<hsize_t>(count)}, values.data());
  });
  return values;
}

void write_pairs_attributes(hid_t file, const PairsLayout& layout) {
  io::write_attribute(file, version_name, pairs_version);
  const io::AttributeWriter write(file);
  list_attributes(layout, write);
}

PairsLayout read_pairs_layout(hid_t file, std::int64_t file_bytes) {
  io::read_version(file, version_name, pairs_version, pairs_version, "kvzap collect");
  PairsLayout layout;
  PairsInfo& info = layout.info;
  io::AttributeReader read(file);
  list_attributes(layout, read);
  info.command = parse_command(layout.command);

  // Checked before any allocation whose size comes from the file.
  const std::int64_t bytes_at_most =
      file_bytes > std::numeric_limits<std::int64_t>::max() / most_quantised
          ? std::numeric_limits<std::int64_t>::max()
          : file_bytes * most_quantised;
  constexpr std::int64_t bytes_of_text = 3 * sizeof(std::int64_t);
  if (info.planned_texts > bytes_at_most / bytes_of_text) {
    throw Error(fmt::format("attribute 'planned_texts' is {}, more than fit a file of {} bytes",
                            info.planned_texts, file_bytes));
  }
  const std::int64_t texts = info.planned_texts;
  info.text_begin = text_integers(file, "/texts/begin", texts + 1);
  const std::vector<std::int64_t> lines = text_integers(file, "/texts/line", texts);
  const std::vector<std::int64_t> tokens = text_integers(file, "/texts/tokens", texts);
  std::vector<std::string> subsets = text_subsets(file, texts, bytes_at_most);
  for (std::int64_t t = 0; t < texts; ++t) {
    if (info.text_begin[t + 1] < info.text_begin[t]) {
      throw Error(fmt::format("'/texts/begin' falls from {} to {} at text {}; expected it to rise",
                              info.text_begin[t], info.text_begin[t + 1], t));
    }
    layout.texts.push_back({lines[t], std::move(subsets[t]), tokens[t], {}});
  }
  if (info.text_begin.front() != 0 || info.text_begin.back() != info.planned_pairs ||
      info.text_begin[info.texts] != info.pairs) {
    throw Error(
        fmt::format("'/texts/begin' has {} for the first text, {} for the last one's end, {} for "
                    "the end of text {}; expected 0, {}, {}",
                    info.text_begin.front(), info.text_begin.back(), info.text_begin[info.texts],
                    info.texts, info.planned_pairs, info.pairs));
  }
  info.text_begin.resize(static_cast<std::size_t>(info.texts) + 1);

  open_data_set(file, "/positions", H5T_INTEGER, "integers", {info.planned_pairs});
  for (int l = 0; l < info.layers; ++l) {
    const auto chunk = check_pairs(file, pairs_data_set(l, "hidden"), info.dtype,
                                   {info.planned_pairs, info.hidden_size});
    check_pairs(file, pairs_data_set(l, "scores"), DType::f32, {info.planned_pairs, info.kv_heads});
    if (l == 0 && !chunk.empty()) {
      layout.chunk_pairs = chunk[0];
      layout.chunk_columns = chunk[1];
    }
  }
  return layout;
}

}  // namespace kvzap::train
