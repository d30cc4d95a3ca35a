#include "pairs_layout.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "files/json_field.hpp"
#include "files/json_file.hpp"
#include "io/checked_objects.hpp"

namespace kvzap::train {
namespace {

// Limits of valid files; larger products would not fit 64 bits.
constexpr std::int64_t most_hidden = std::int64_t{1} << 20;
constexpr std::int64_t most_layers = std::int64_t{1} << 12;
constexpr std::int64_t most_heads = std::int64_t{1} << 12;
constexpr std::int64_t most_pairs = std::int64_t{1} << 40;
// HDF5 holds whole chunks in memory.
constexpr std::int64_t most_chunk_bytes = std::int64_t{256} << 20;
// Deflate's best ratio is 1032 to 1.
constexpr std::int64_t most_quantised = 2048;

// Accepts only links within the file. Other links would read files that the user did not name.
io::Hdf5Handle open_data_set(hid_t file, const std::string& name) {
  for (std::size_t end = 0; end != std::string::npos;) {
    end = name.find('/', end + 1);
    const std::string path = name.substr(0, end);
    if (!io::checked::has_child(file, path, path)) {
      throw Error(fmt::format("'{}' is missing", path));
    }
  }
  return {H5Dopen2(file, name.c_str(), H5P_DEFAULT), H5Dclose, "H5Dopen2"};
}

// Opens a data set that has these extents, or more rows, and, if `type` is given, this type. (A
// command that was shortened fills fewer rows than its file has.)
io::Hdf5Handle checked_data_set(hid_t file, const std::string& name,
                                const std::vector<std::int64_t>& extents, hid_t type,
                                const std::string& type_name) {
  io::Hdf5Handle data_set = open_data_set(file, name);
  const io::Hdf5Handle space(H5Dget_space(data_set), H5Sclose, "H5Dget_space");
  const int rank =
      io::checked_hdf5(H5Sget_simple_extent_ndims(space), "H5Sget_simple_extent_ndims");
  std::vector<hsize_t> found(static_cast<std::size_t>(rank));
  io::checked_hdf5(H5Sget_simple_extent_dims(space, found.data(), nullptr),
                   "H5Sget_simple_extent_dims");
  const std::vector<hsize_t> expected(extents.begin(), extents.end());
  const bool fits = found.size() == expected.size() && found[0] >= expected[0] &&
                    std::equal(found.begin() + 1, found.end(), expected.begin() + 1);
  if (!fits) {
    throw Error(fmt::format("'{}' has the extents ({}); expected ({}), or more rows", name,
                            fmt::join(found, ", "), fmt::join(expected, ", ")));
  }
  const io::Hdf5Handle stored(H5Dget_type(data_set), H5Tclose, "H5Dget_type");
  const bool good = type < 0 ? H5Tget_class(stored) == H5T_INTEGER
                             : io::checked_hdf5(H5Tequal(stored, type), "H5Tequal") > 0;
  if (!good) {
    throw Error(fmt::format("'{}' has values of another type; expected {}", name, type_name));
  }
  const io::Hdf5Handle create(H5Dget_create_plist(data_set), H5Pclose, "H5Dget_create_plist");
  io::checked::layout_of(create, name);
  const int filters = io::checked_hdf5(H5Pget_nfilters(create), "H5Pget_nfilters");
  for (int i = 0; i < filters; ++i) {
    unsigned flags = 0;
    std::size_t values = 0;
    unsigned config = 0;
    const H5Z_filter_t filter = H5Pget_filter2(create, static_cast<unsigned>(i), &flags, &values,
                                               nullptr, 0, nullptr, &config);
    if (io::checked_hdf5(filter, "H5Pget_filter2") >= 0 && H5Zfilter_avail(filter) <= 0) {
      throw Error(fmt::format("'{}' is packed with HDF5 filter {}, which this HDF5 does not have",
                              name, static_cast<int>(filter)));
    }
  }
  return data_set;
}

// Returns the extents of a data set's chunks, or an empty vector if it has none.
std::vector<std::int64_t> chunk_extents(hid_t data_set, const std::string& name) {
  const io::Hdf5Handle create(H5Dget_create_plist(data_set), H5Pclose, "H5Dget_create_plist");
  if (H5Pget_layout(create) != H5D_CHUNKED) return {};
  std::vector<hsize_t> extents(2);
  io::checked_hdf5(H5Pget_chunk(create, 2, extents.data()), "H5Pget_chunk");
  const io::Hdf5Handle type(H5Dget_type(data_set), H5Tclose, "H5Dget_type");
  const hsize_t most = most_chunk_bytes / H5Tget_size(type);
  if (extents[0] > most || extents[1] > most / extents[0]) {
    throw Error(fmt::format("'{}' has chunks of {} x {} values; expected at most {} bytes", name,
                            extents[0], extents[1], most_chunk_bytes));
  }
  return {extents.begin(), extents.end()};
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
  checked_data_set(file, name, {count}, -1, "integers");
  return read_integers(file, name, 0, count);
}

std::vector<std::string> text_subsets(hid_t file, std::int64_t count, std::int64_t bytes_at_most) {
  const std::string name = "/texts/subset";
  const io::Hdf5Handle data_set = open_data_set(file, name);
  const io::Hdf5Handle type(H5Dget_type(data_set), H5Tclose, "H5Dget_type");
  if (H5Tget_class(type) != H5T_STRING ||
      io::checked_hdf5(H5Tis_variable_str(type), "H5Tis_variable_str") > 0) {
    throw Error(fmt::format("'{}' has values of another type; expected texts of one length", name));
  }
  checked_data_set(file, name, {count}, type, "texts");
  const std::size_t size = H5Tget_size(type);
  if (static_cast<std::int64_t>(size) > bytes_at_most / count) {
    throw Error(fmt::format("'{}' has texts of {} bytes, more than fit the file", name, size));
  }
  std::vector<char> all(size * static_cast<std::size_t>(count));
  const io::Hdf5Handle space(H5Dget_space(data_set), H5Sclose, "H5Dget_space");
  select_rows(space, 0, count, 0, 0);
  const io::Hdf5Handle memory = io::simple_space({static_cast<hsize_t>(count)});
  io::checked_hdf5(H5Dread(data_set, type, memory, space, H5P_DEFAULT, all.data()), "H5Dread");
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

void select_rows(hid_t space, std::int64_t begin, std::int64_t rows, std::int64_t first,
                 std::int64_t columns) {
  if (rows == 0) {
    io::checked_hdf5(H5Sselect_none(space), "H5Sselect_none");
    return;
  }
  const hsize_t start[2] = {static_cast<hsize_t>(begin), static_cast<hsize_t>(first)};
  const hsize_t count[2] = {static_cast<hsize_t>(rows), static_cast<hsize_t>(columns)};
  io::checked_hdf5(H5Sselect_hyperslab(space, H5S_SELECT_SET, start, nullptr, count, nullptr),
                   "H5Sselect_hyperslab");
}

std::vector<std::int64_t> read_integers(hid_t file, const std::string& name, std::int64_t begin,
                                        std::int64_t count) {
  const io::Hdf5Handle data_set(H5Dopen2(file, name.c_str(), H5P_DEFAULT), H5Dclose, "H5Dopen2");
  std::vector<std::int64_t> values(static_cast<std::size_t>(count));
  if (count == 0) return values;
  const io::Hdf5Handle space(H5Dget_space(data_set), H5Sclose, "H5Dget_space");
  select_rows(space, begin, count, 0, 0);
  const io::Hdf5Handle memory = io::simple_space({static_cast<hsize_t>(count)});
  if (H5Dread(data_set, H5T_NATIVE_INT64, memory, space, H5P_DEFAULT, values.data()) < 0) {
    throw Error(fmt::format("'{}': {}", name, io::hdf5_failure("H5Dread")));
  }
  return values;
}

PairsLayout read_pairs_layout(hid_t file, std::int64_t file_bytes) {
  const io::Hdf5Handle root(H5Gopen2(file, "/", H5P_DEFAULT), H5Gclose, "H5Gopen2");
  const auto integer = [&](const char* name, std::int64_t least, std::int64_t most) {
    return io::checked::integer(root, name, least, most);
  };
  if (io::checked_hdf5(H5Aexists(root, "kvzap_pairs_version"), "H5Aexists") == 0) {
    throw Error(
        "attribute 'kvzap_pairs_version' is missing; expected a file made by kvzap collect");
  }
  const std::int64_t found =
      integer("kvzap_pairs_version", 0, std::numeric_limits<std::int64_t>::max());
  if (found != pairs_version) {
    throw Error(fmt::format("attribute 'kvzap_pairs_version' is {}; this kvzap reads version {}",
                            found, pairs_version));
  }
  PairsLayout layout;
  PairsInfo& info = layout.info;
  info.model = io::checked::text(root, "model");
  info.dtype = dtype_from_name(io::checked::text(root, "dtype"));
  info.hidden_size = integer("hidden_size", 1, most_hidden);
  info.layers = static_cast<int>(integer("layers", 1, most_layers));
  info.kv_heads = static_cast<int>(integer("kv_heads", 1, most_heads));
  info.planned_pairs = integer("planned_pairs", 1, most_pairs);
  info.planned_texts = integer("planned_texts", 1, info.planned_pairs);
  info.pairs = integer("pairs", 0, info.planned_pairs);
  info.texts = integer("texts", 0, info.planned_texts);
  layout.written = integer("written", info.pairs, info.planned_pairs);
  layout.metadata_bytes = integer("metadata_bytes", 0, std::numeric_limits<std::int64_t>::max());
  info.command = parse_command(io::checked::text(root, "command"));

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

  checked_data_set(file, "/positions", {info.planned_pairs}, -1, "integers");
  const io::Hdf5Handle hidden_type = io::type_in_file(info.dtype);
  const io::Hdf5Handle score_type = io::type_in_file(DType::f32);
  for (int l = 0; l < info.layers; ++l) {
    const std::string hidden = pairs_data_set(l, "hidden");
    const std::string scores = pairs_data_set(l, "scores");
    const io::Hdf5Handle of_hidden =
        checked_data_set(file, hidden, {info.planned_pairs, info.hidden_size}, hidden_type,
                         std::string(name_of(info.dtype)));
    const io::Hdf5Handle of_scores =
        checked_data_set(file, scores, {info.planned_pairs, info.kv_heads}, score_type, "f32");
    const std::vector<std::int64_t> chunk = chunk_extents(of_hidden, hidden);
    chunk_extents(of_scores, scores);
    if (l == 0 && !chunk.empty()) {
      layout.chunk_pairs = chunk[0];
      layout.chunk_columns = chunk[1];
    }
  }
  return layout;
}

}  // namespace kvzap::train
