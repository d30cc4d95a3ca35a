#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <kvzap/core/head_partition.hpp>
#include <kvzap/lab/pairs.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>

#include "base/stopwatch.hpp"
#include "files/temporary_file.hpp"
#include "io/hdf5_file.hpp"
#include "parallel/message.hpp"
#include "train/pairs_layout.hpp"
#include "train/pairs_recovery.hpp"
#include "train/pairs_structure.hpp"

namespace kvzap {
namespace {

namespace fs = std::filesystem;
using base::Clock;
using base::seconds_since;
using io::checked_hdf5;
using io::CollectiveOutcome;
using io::Hdf5Handle;
using io::simple_space;
using train::fixed_region;
using train::FixedRegion;
using train::packed_zeros;
using train::pairs_data_set;
using train::pairs_kind;
using train::text_begins;

// Bytes of hidden states that a rank passes to one collective write. The limit bounds the buffers
// of MPI-IO and the filters.
constexpr std::int64_t max_transfer_bytes = std::int64_t{16} << 20;

// The command's limit of texts.
constexpr const char* texts_option = "--max-texts";

// ---- Continuing a file: rank 0 alone ------------------------------------------------------------

// Throws Error with the differences between the file and the plan. The plan may have fewer texts
// than the file, the first ones.
void compare(const train::PairsLayout& layout, hid_t file, const PairsPlan& plan) {
  const PairsInfo& info = layout.info;
  std::vector<std::string> differences;
  const auto differ = [&](const std::string& what, const std::string& there,
                          const std::string& here) {
    if (there != here) differences.push_back(fmt::format("{} is {}, now {}", what, there, here));
  };
  auto names = plan.command;
  names.insert(info.command.begin(), info.command.end());
  const auto texts = static_cast<std::int64_t>(plan.texts.size());
  if (texts <= info.planned_texts) names.erase(texts_option);
  for (const auto& [name, ignored] : names) {
    const auto value = [&name = name](const std::map<std::string, std::string>& command) {
      const auto found = command.find(name);
      return found == command.end() ? std::string("not set") : found->second;
    };
    differ(name, value(info.command), value(plan.command));
  }
  differ("dtype", std::string(name_of(info.dtype)), std::string(name_of(plan.dtype)));
  differ("hidden_size", std::to_string(info.hidden_size), std::to_string(plan.hidden_size));
  differ("layers", std::to_string(info.layers), std::to_string(plan.layers));
  differ("kv_heads", std::to_string(info.kv_heads), std::to_string(plan.kv_heads));
  const std::vector<std::int64_t> begins = text_begins(plan);
  if (texts > info.planned_texts) {
    differ("the number of texts", std::to_string(info.planned_texts), std::to_string(texts));
  } else {
    const std::int64_t pairs = train::read_integers(file, "/texts/begin", texts, 1)[0];
    differ("the number of pairs", std::to_string(pairs), std::to_string(begins.back()));
  }
  if (differences.empty()) {
    std::vector<std::int64_t> positions;
    for (std::size_t t = 0; t < plan.texts.size(); ++t) {
      const auto& there = layout.texts[t];
      const auto& here = plan.texts[t];
      if (there.line != here.line || there.tokens != here.tokens || there.subset != here.subset) {
        differences.push_back(fmt::format("text {} is another one", t + 1));
        break;
      }
      positions.insert(positions.end(), here.positions.begin(), here.positions.end());
    }
    if (differences.empty() &&
        train::read_integers(file, "/positions", 0, begins.back()) != positions) {
      differences.emplace_back("positions are others (was it made by another version of kvzap?)");
    }
  }
  if (!differences.empty()) {
    throw Error(fmt::format(
        "it exists and was made by another command: {}; name another file, or move it away",
        fmt::join(differences, "; ")));
  }
}

// Returns whether the file is marked as complete. flush() sets this mark after all else is on disk.
bool says_complete(const fs::path& path) {
  try {
    const Hdf5Handle file = io::open_to_read(path);
    return train::read_pairs_layout(file, static_cast<std::int64_t>(fs::file_size(path)))
        .info.is_complete();
  } catch (const Error&) {
    return false;
  }
}

// ---- Appending: all ranks -----------------------------------------------------------------------

class Hdf5PairsWriter final : public PairsWriter {
 public:
  Hdf5PairsWriter(const fs::path& file, const PairsPlan& plan,
                  const std::vector<std::vector<int>>& heads, const Communicator& comm)
      : m_path(file),
        m_comm(comm),
        m_recovery(file),
        m_heads(heads),
        m_flush_share(plan.flush_share) {
    const io::QuietHdf5 quiet;
    std::int64_t exists = 0;
    agree([&] {
      if (!m_comm.is_root()) return;
      const fs::file_status status = fs::status(m_path);
      exists = fs::exists(status) ? 1 : 0;
      if (exists != 0 && !fs::is_regular_file(status)) {
        throw Error("it exists and is not a regular file");
      }
    });
    m_comm.broadcast(&exists, sizeof(exists), 0);
    if (exists == 0) create(plan);
    go_on(plan, exists != 0);
    if (m_texts < m_planned_texts) open_all();
  }

  ~Hdf5PairsWriter() override {
    const io::QuietHdf5 quiet;
    // Closing is collective, but a rank that stops early may be alone. If HDF5 still writes when
    // the program ends, the recovery file undoes it.
    if (!m_file) return;
    if (m_comm.size() == 1) {
      m_file.reset();
      return;
    }
    static_cast<void>(m_file.release());
  }

  std::int64_t texts() const override { return m_texts; }
  std::int64_t safe_texts() const override { return m_safe_texts; }
  std::int64_t planned_texts() const override { return m_planned_texts; }
  std::int64_t bytes() const override { return m_bytes; }
  const std::vector<std::string>& notes() const override { return m_notes; }

  void append(const TextPairs& text) override {
    const io::QuietHdf5 quiet;
    std::int64_t pairs = 0;
    std::vector<float> scores;
    agree([&] {
      if (!m_file || m_texts >= m_planned_texts) throw Error("there is no further text to append");
      pairs = m_text_begin[m_texts + 1] - m_text_begin[m_texts];
      check(text, pairs);
      scores = spread_scores(text, pairs);
    });
    m_comm.all_reduce_sum(scores.data(), scores.size());
    agree([&] { keep(text, scores, pairs); });
    ++m_texts;
    write_chunks();
    std::int64_t is_due = seconds_since(m_flushed) * m_flush_share >= m_flush_seconds ? 1 : 0;
    m_comm.broadcast(&is_due, sizeof(is_due), 0);
    if (is_due != 0) flush();
  }

  void close() override {
    if (!m_file) return;
    const io::QuietHdf5 quiet;
    flush();
    CollectiveOutcome outcome;
    outcome.note(m_file->close(), "closing");
    m_file.reset();
    outcome.agree(m_comm, m_path, pairs_kind);
    agree([&] { m_calls.sync_file(m_path); });
    agree([&] {
      if (!m_comm.is_root()) return;
      if (m_safe_texts == m_planned_texts) m_recovery.remove();
      m_bytes = static_cast<std::int64_t>(fs::file_size(m_path));
    });
    m_comm.broadcast(&m_bytes, sizeof(m_bytes), 0);
  }

 private:
  struct DataSet {
    Hdf5Handle handle;
    std::int64_t columns;
    std::int64_t chunk_columns;
    std::vector<char> zeros;  // a packed chunk of zeros
  };

  // Open HDF5 handles.
  struct Files {
    Hdf5Handle file;
    Hdf5Handle transfer;
    Hdf5Handle hidden_type;
    std::vector<DataSet> hidden;  // one for each layer
    std::vector<DataSet> scores;

    herr_t close() {
      hidden.clear();
      scores.clear();
      return file.close();
    }
  };

  // Pairs of a layer, from m_written on, that do not yet fill a chunk.
  struct Pending {
    std::int64_t first_column = 0;
    std::int64_t columns = 0;
    std::vector<char> hidden;   // (pair, columns of this rank)
    std::vector<float> scores;  // (pair, KV head), on the rank that writes them
  };

  void agree(const std::function<void()>& work) const {
    files::agree_on_file(m_comm, m_path, work, pairs_kind);
  }

  // Collective.
  void create(const PairsPlan& plan) {
    files::TemporaryFile temporary(m_path, m_comm, m_calls, pairs_kind);
    temporary.create();
    agree([&] {
      if (!m_comm.is_root()) return;
      m_notes = temporary.remove_leftovers();
      train::write_structure(temporary.path(), plan);
      FixedRegion region{};
      {
        const Hdf5Handle hdf5 = io::open_to_read(temporary.path());
        region = fixed_region(hdf5);
      }
      m_recovery.save(temporary.path(), region.begin, region.end);
    });
    temporary.move_to_target();
  }

  // Restores the file to the state after its last finished text and sends this state to all ranks.
  // Collective.
  void go_on(const PairsPlan& plan, bool is_old) {
    agree([&] {
      if (!m_comm.is_root()) return;
      m_claim.emplace(m_path);
      train::remove_mpi_locks(m_path);
      // A complete file needs no restoring, and an older recovery file must not overwrite it.
      const bool restored = !says_complete(m_path) && m_recovery.restore();
      const Hdf5Handle hdf5 = io::open_to_read(m_path);
      const auto size = static_cast<std::int64_t>(fs::file_size(m_path));
      const train::PairsLayout layout = train::read_pairs_layout(hdf5, size);
      compare(layout, hdf5, plan);
      const FixedRegion region = fixed_region(hdf5);
      if (!layout.info.is_complete() &&
          (region.begin != layout.metadata_bytes || layout.chunk_pairs == 0)) {
        throw Error("another program has rewritten it; it can be read but not continued");
      }
      if (is_old) m_notes.push_back(state_text(layout.info, plan, restored));
      if (layout.info.is_complete()) m_recovery.remove();
      m_texts = layout.info.texts;
      m_written = layout.written;
      m_chunk_pairs = std::max<std::int64_t>(1, layout.chunk_pairs);
      m_chunk_columns = std::max<std::int64_t>(1, layout.chunk_columns);
      m_metadata_bytes = region.begin;
      m_fixed_bytes = region.end;
      m_bytes = size;
      m_text_begin = text_begins(plan);
    });
    parallel::broadcast(m_comm, 0, m_texts, m_written, m_chunk_pairs, m_chunk_columns,
                        m_metadata_bytes, m_fixed_bytes, m_bytes, m_text_begin);
    m_safe_texts = m_texts;
    m_planned_texts = static_cast<std::int64_t>(m_text_begin.size()) - 1;
    m_dtype = plan.dtype;
    m_hidden_size = plan.hidden_size;
    m_kv_heads = plan.kv_heads;
    deal_columns(plan.layers);
  }

  // The chunks of a row are distributed evenly to ranks. If there are fewer chunks than ranks,
  // layers take turns.
  void deal_columns(int layers) {
    const std::int64_t chunks = (m_hidden_size + m_chunk_columns - 1) / m_chunk_columns;
    for (int l = 0; l < layers; ++l) {
      const auto [begin, end] =
          even_range(chunks, m_comm.size(), (m_comm.rank() + l) % m_comm.size());
      Pending pending;
      pending.first_column = std::min(begin * m_chunk_columns, m_hidden_size);
      pending.columns = std::min(end * m_chunk_columns, m_hidden_size) - pending.first_column;
      m_pending.push_back(std::move(pending));
    }
  }

  bool writes_scores(std::size_t layer) const {
    return static_cast<int>(layer % static_cast<std::size_t>(m_comm.size())) == m_comm.rank();
  }

  // Describes a file that exists.
  std::string state_text(const PairsInfo& info, const PairsPlan& plan, bool restored) const {
    const auto asked = static_cast<std::int64_t>(plan.texts.size());
    std::string text =
        fmt::format("{} has {} of {} texts", m_path.string(), info.texts, info.planned_texts);
    const bool is_shorter = asked < info.planned_texts;
    if (info.is_complete() || info.texts >= asked) {
      if (is_shorter) text += fmt::format(", and {} are requested", asked);
      return text + ": there is nothing to do";
    }
    text += restored ? "; continuing after the texts that its run had finished" : "; continuing";
    return is_shorter ? text + fmt::format(", and ending at {} texts", asked) : text;
  }

  // Collective.
  void open_all() {
    m_file = std::make_unique<Files>();
    m_file->file = io::open_together(m_path, m_comm, pairs_kind);
    agree([&] {
      m_file->transfer = io::transfer_together(m_comm);
      m_file->hidden_type = io::type_in_memory(m_dtype);
      const auto open = [&](std::size_t layer, const char* name, std::int64_t columns,
                            std::int64_t chunk_columns, std::vector<DataSet>& data_sets) {
        Hdf5Handle handle(
            H5Dopen2(m_file->file, pairs_data_set(static_cast<int>(layer), name).c_str(),
                     H5P_DEFAULT),
            H5Dclose, "H5Dopen2");
        std::vector<char> zeros = layer == 0 ? packed_zeros(handle) : data_sets[0].zeros;
        data_sets.push_back({std::move(handle), columns, chunk_columns, std::move(zeros)});
      };
      for (std::size_t l = 0; l < m_pending.size(); ++l) {
        open(l, "hidden", m_hidden_size, m_chunk_columns, m_file->hidden);
        open(l, "scores", m_kv_heads, m_kv_heads, m_file->scores);
      }
    });
    m_flushed = Clock::now();
  }

  void check(const TextPairs& text, std::int64_t pairs) const {
    if (text.layers.size() != m_pending.size()) {
      throw Error(
          fmt::format("the text has {} layers; expected {}", text.layers.size(), m_pending.size()));
    }
    const std::size_t bytes = static_cast<std::size_t>(pairs * m_hidden_size) * size_of(m_dtype);
    const std::size_t scores = static_cast<std::size_t>(pairs) * m_heads[m_comm.rank()].size();
    for (const auto& layer : text.layers) {
      if (layer.hidden.size() != bytes || layer.scores.size() != scores) {
        throw Error(
            fmt::format("a layer has {} bytes of hidden states and {} scores; expected {} "
                        "and {}",
                        layer.hidden.size(), layer.scores.size(), bytes, scores));
      }
    }
  }

  // (layer, pair, KV head): this rank's scores, and zeros elsewhere, for the sum over ranks.
  std::vector<float> spread_scores(const TextPairs& text, std::int64_t pairs) const {
    std::vector<float> all(m_pending.size() * static_cast<std::size_t>(pairs * m_kv_heads), 0.0F);
    const std::vector<int>& heads = m_heads[m_comm.rank()];
    for (std::size_t l = 0; l < m_pending.size(); ++l) {
      for (std::int64_t p = 0; p < pairs; ++p) {
        float* const row = all.data() + (static_cast<std::int64_t>(l) * pairs + p) * m_kv_heads;
        for (std::size_t h = 0; h < heads.size(); ++h) {
          row[heads[h]] = text.layers[l].scores[static_cast<std::size_t>(p) * heads.size() + h];
        }
      }
    }
    return all;
  }

  // Adds a text's pairs to the pending ones, except pairs that the file already has.
  void keep(const TextPairs& text, const std::vector<float>& scores, std::int64_t pairs) {
    const std::int64_t skip = std::clamp<std::int64_t>(m_written - m_text_begin[m_texts], 0, pairs);
    const auto value = static_cast<std::int64_t>(size_of(m_dtype));
    for (std::size_t l = 0; l < m_pending.size(); ++l) {
      Pending& pending = m_pending[l];
      for (std::int64_t p = skip; p < pairs && pending.columns > 0; ++p) {
        const auto begin =
            text.layers[l].hidden.begin() + (p * m_hidden_size + pending.first_column) * value;
        pending.hidden.insert(pending.hidden.end(), begin, begin + pending.columns * value);
      }
      if (writes_scores(l)) {
        const auto begin = scores.begin() + static_cast<std::int64_t>(l) * pairs * m_kv_heads;
        pending.scores.insert(pending.scores.end(), begin + skip * m_kv_heads,
                              begin + pairs * m_kv_heads);
      }
    }
  }

  // Writes whole chunks and, after the last text, the partial one. Collective.
  void write_chunks() {
    const std::int64_t last = m_text_begin[m_texts];
    const std::int64_t end =
        m_texts == m_planned_texts ? last : last / m_chunk_pairs * m_chunk_pairs;
    if (end <= m_written) return;
    const std::int64_t row_bytes = m_hidden_size * static_cast<std::int64_t>(size_of(m_dtype));
    const std::int64_t most =
        std::max<std::int64_t>(1, max_transfer_bytes / (row_bytes * m_chunk_pairs)) * m_chunk_pairs;
    reserve(end - m_written);
    const std::int64_t begin = m_written;
    for (std::int64_t first = begin; first < end; first += most) {
      // The first rows complete a chunk that an earlier text began.
      const std::int64_t rows = std::min(most, end - first);
      for (std::size_t l = 0; l < m_pending.size(); ++l) write_layer(l, first, rows, first - begin);
    }
    for (std::size_t l = 0; l < m_pending.size(); ++l) {
      drop(m_pending[l].hidden,
           (end - begin) * m_pending[l].columns * static_cast<std::int64_t>(size_of(m_dtype)));
      if (writes_scores(l)) drop(m_pending[l].scores, (end - begin) * m_kv_heads);
    }
    m_written = end;
  }

  template <class Value>
  static void drop(std::vector<Value>& values, std::int64_t count) {
    values.erase(values.begin(), values.begin() + count);
  }

  // Collective.
  void reserve(std::int64_t pairs) const {
    try {
      take_room(pairs);
    } catch (const AgreedError&) {
      // Gives back disk space that was reserved for earlier chunks and not used.
      flush_file();
      take_room(pairs);
    }
  }

  // Writes all data that HDF5 buffers and truncates the file to its length. HDF5's MPI-IO driver
  // truncates by itself; the driver for one process does not know that take_room extended the file.
  // Collective.
  void flush_file() const {
    CollectiveOutcome outcome;
    outcome.note(H5Fflush(m_file->file, H5F_SCOPE_GLOBAL), "H5Fflush");
    outcome.agree(m_comm, m_path, pairs_kind);
    if (m_comm.size() > 1) return;
    agree([&] {
      haddr_t end = 0;
      checked_hdf5(H5Fget_eoa(m_file->file, &end), "H5Fget_eoa");
      fs::resize_file(m_path, end);
    });
  }

  // Reserves disk space for these pairs at their unpacked size. Collective.
  void take_room(std::int64_t pairs) const {
    agree([&] {
      if (!m_comm.is_root()) return;
      const std::int64_t row = m_hidden_size * static_cast<std::int64_t>(size_of(m_dtype)) +
                               m_kv_heads * static_cast<std::int64_t>(sizeof(float));
      const std::int64_t data = row * pairs * static_cast<std::int64_t>(m_pending.size());
      const files::FileDescriptor descriptor(m_path, O_RDWR | O_CLOEXEC);
      if (descriptor.get() < 0) throw files::system_error("cannot be opened", errno);
      constexpr std::int64_t quantised_worse = 500;  // deflate adds at most 5 bytes to 16 KiB
      io::reserve(descriptor.get(), static_cast<std::int64_t>(fs::file_size(m_path)),
                  data + data / quantised_worse + (std::int64_t{1} << 16));
    });
  }

  // Writes rows first … first + rows - 1 of the file from the pending rows, beginning at row
  // `offset`. Collective.
  void write_layer(std::size_t layer, std::int64_t first, std::int64_t rows, std::int64_t offset) {
    const Pending& pending = m_pending[layer];
    const auto value = static_cast<std::int64_t>(size_of(m_dtype));
    write_rows(m_file->hidden[layer], m_file->hidden_type, first, rows, pending.first_column,
               pending.columns, pending.hidden.data() + offset * pending.columns * value);
    const std::int64_t heads = writes_scores(layer) ? m_kv_heads : 0;
    write_rows(m_file->scores[layer], H5T_NATIVE_FLOAT, first, rows, 0, heads,
               pending.scores.data() + offset * heads);
  }

  // Each rank writes `columns` of its columns, or none. Collective.
  void write_rows(const DataSet& data_set, hid_t type, std::int64_t first, std::int64_t rows,
                  std::int64_t first_column, std::int64_t columns, const void* data) const {
    Hdf5Handle space, memory;
    agree([&] {
      space = io::selection(data_set.handle,
                            {static_cast<hsize_t>(first), static_cast<hsize_t>(first_column)},
                            {static_cast<hsize_t>(rows), static_cast<hsize_t>(columns)});
      memory = simple_space(
          {static_cast<hsize_t>(rows), static_cast<hsize_t>(std::max<std::int64_t>(columns, 1))});
      if (columns == 0) checked_hdf5(H5Sselect_none(memory), "H5Sselect_none");
    });
    CollectiveOutcome outcome;
    if (m_comm.size() > 1) place_chunks(data_set, first, rows, outcome);
    outcome.note(H5Dwrite(data_set.handle, type, memory, space, m_file->transfer, data),
                 "H5Dwrite");
    outcome.agree(m_comm, m_path, pairs_kind);
  }

  // Allocates each chunk in the file, with zeros in it. In a collective write, HDF5 1.10 takes all
  // unallocated chunks for the same chunk, and waits forever for ranks to send their parts of it.
  // Collective.
  void place_chunks(const DataSet& data_set, std::int64_t first, std::int64_t rows,
                    CollectiveOutcome& outcome) const {
    for (std::int64_t row = first / m_chunk_pairs * m_chunk_pairs; row < first + rows;
         row += m_chunk_pairs) {
      for (std::int64_t column = 0; column < data_set.columns; column += data_set.chunk_columns) {
        const hsize_t offset[2] = {static_cast<hsize_t>(row), static_cast<hsize_t>(column)};
        outcome.note(H5Dwrite_chunk(data_set.handle, H5P_DEFAULT, 0, offset, data_set.zeros.size(),
                                    data_set.zeros.data()),
                     "H5Dwrite_chunk");
      }
    }
  }

  // Marks the last written texts as finished. Collective.
  void flush() {
    std::int64_t texts = m_safe_texts;
    while (texts < m_texts && m_text_begin[texts + 1] <= m_written) ++texts;
    if (texts == m_safe_texts) return;
    const auto start = Clock::now();
    if (texts == m_planned_texts) {
      // The data must be on disk before the file is marked as complete.
      flush_file();
      agree([&] { m_calls.sync_file(m_path); });
    }
    CollectiveOutcome outcome;
    const auto note = [&](const char* name, std::int64_t value) {
      outcome.attempt([&] { io::set_attribute(m_file->file, name, value); });
    };
    note("texts", texts);
    note("pairs", m_text_begin[texts]);
    if (texts == m_planned_texts) {
      // The plan may be shorter than the file's.
      note("planned_texts", texts);
      note("planned_pairs", m_text_begin[texts]);
    }
    note("written", m_written);
    outcome.agree(m_comm, m_path, pairs_kind);
    flush_file();
    // Each node wrote a part of the file.
    agree([&] { m_calls.sync_file(m_path); });
    agree([&] {
      if (!m_comm.is_root()) return;
      m_recovery.save(m_path, m_metadata_bytes, m_fixed_bytes);
      m_bytes = static_cast<std::int64_t>(fs::file_size(m_path));
    });
    m_comm.broadcast(&m_bytes, sizeof(m_bytes), 0);
    m_safe_texts = texts;
    m_flushed = Clock::now();
    m_flush_seconds = seconds_since(start);
  }

  fs::path m_path;
  Communicator m_comm;
  files::DurableCalls m_calls = files::DurableCalls::of_system();
  train::PairsRecovery m_recovery;  // on rank 0, like the claim
  std::optional<train::PairsClaim> m_claim;
  std::vector<std::vector<int>> m_heads;
  double m_flush_share;
  double m_flush_seconds = 0;  // duration of the last flush
  std::vector<std::string> m_notes;
  std::unique_ptr<Files> m_file;
  DType m_dtype = DType::bf16;
  std::int64_t m_hidden_size = 0;
  std::int64_t m_kv_heads = 0;
  std::int64_t m_chunk_pairs = 1;
  std::int64_t m_chunk_columns = 1;
  std::int64_t m_metadata_bytes = 0;
  std::int64_t m_fixed_bytes = 0;
  std::int64_t m_bytes = 0;
  std::int64_t m_texts = 0;       // appended texts
  std::int64_t m_safe_texts = 0;  // texts that no crash can undo
  std::int64_t m_planned_texts = 0;
  std::int64_t m_written = 0;  // written pairs
  std::vector<std::int64_t> m_text_begin;
  std::vector<Pending> m_pending;
  Clock::time_point m_flushed;
};

}  // namespace

std::unique_ptr<PairsWriter> PairsWriter::open(const fs::path& file, const PairsPlan& plan,
                                               const std::vector<std::vector<int>>& heads,
                                               const Communicator& comm) {
  return std::make_unique<Hdf5PairsWriter>(file, plan, heads, comm);
}

}  // namespace kvzap
