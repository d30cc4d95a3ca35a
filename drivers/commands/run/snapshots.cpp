#include "commands/run/snapshots.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "console/console.hpp"
#include "console/signals.hpp"
#include "files/temporary_file.hpp"

namespace kvzap::driver {
namespace {

namespace fs = std::filesystem;

/// Copies a file such that the copy appears only when it is complete. For one process alone.
void copy_whole(const fs::path& from, const fs::path& to) {
  files::replace_file(to, "snapshot", [&](const fs::path& path) {
    fs::copy_file(from, path, fs::copy_options::overwrite_existing);
  });
}

}  // namespace

Snapshots::Snapshots(const RunOptions& options, const session::Conversation& conversation,
                     const Communicator& comm, Progress& bar, std::vector<WrittenSnapshot>& written)
    : m_options(options),
      m_conversation(conversation),
      m_comm(comm),
      m_bar(bar),
      m_written(written) {
  if (!options.snapshot_content.empty()) {
    m_how.content = snapshot_content_from_name(options.snapshot_content);
  }
  // Compression hardly shrinks keys and values, but it shrinks the rows' positions and scores.
  m_how.compress =
      options.snapshot_compress.value_or(m_how.content == SnapshotContent::all ? 0 : 6);
  if (!options.snapshot_dtype.empty()) m_how.dtype = dtype_from_name(options.snapshot_dtype);
}

void Snapshots::write() {
  if (is_on()) begin(!m_options.snapshot_every);
}

void Snapshots::after_step(std::int64_t tokens) {
  if (!is_on()) return;
  m_since += tokens;
  if (m_writing) {
    const auto start = base::Clock::now();
    const bool is_done = m_writing->advance();
    m_waiting_seconds += base::seconds_since(start);
    if (is_done) end();
  }
  const int signal = static_cast<int>(m_comm.all_reduce_max(std::int64_t{caught_signal}));
  if (signal != 0) {
    finish();
    if (m_since > 0 || m_written.empty()) begin(true);
    throw Interrupted{signal};
  }
  if (m_options.snapshot_every && m_since >= *m_options.snapshot_every) begin(false);
}

void Snapshots::finish() {
  if (!m_writing) return;
  const auto start = base::Clock::now();
  m_writing->finish();
  m_waiting_seconds += base::seconds_since(start);
  end();
}

void Snapshots::begin(bool waits) {
  finish();
  std::string not_kept;
  m_comm.agree_on_root([&] { not_kept = keep_older(); });
  if (!not_kept.empty()) tell({not_kept});
  SnapshotInfo info;
  if (m_comm.is_root()) info = m_conversation.info();
  Generator& generator = m_conversation.generator();
  m_start = base::Clock::now();
  if (waits) {
    tell(generator.write_snapshot(m_options.snapshot, std::move(info), m_how));
  } else {
    m_writing = generator.begin_snapshot(m_options.snapshot, std::move(info), m_how);
  }
  m_waiting_seconds = base::seconds_since(m_start);
  m_since = 0;
  if (waits) end();
}

/// Handles a snapshot that is in its place.
void Snapshots::end() {
  WrittenSnapshot written;
  written.seconds = base::seconds_since(m_start);
  written.waiting_seconds = m_waiting_seconds;
  if (m_writing) tell(m_writing->notes());
  m_writing.reset();
  written.file = m_options.snapshot;
  m_comm.agree_on_root([&] {
    try {
      const SnapshotReader reader(m_options.snapshot);
      written.tokens = reader.header().tokens;
      written.bytes = reader.header().file_bytes;
    } catch (const Error& error) {
      // Another process may take snapshots away as soon as they appear. The run continues.
      tell({fmt::format("just written, but removed or changed since: {}", error.what())});
    }
    remove_older();
  });
  m_written.push_back(std::move(written));
}

void Snapshots::tell(const std::vector<std::string>& notes) const {
  if (notes.empty() || m_options.quiet || !m_comm.is_root()) return;
  m_bar.clear();
  for (const std::string& note : notes) say("kvzap: warning: {}\n", note);
}

/// Returns whether a file is a snapshot of this model with the number of tokens that its name
/// gives.
bool Snapshots::is_ours(const fs::path& file, std::int64_t tokens) const {
  try {
    const SnapshotReader reader(file);
    return reader.header().tokens == tokens &&
           reader.header().info.model_hash == m_conversation.description().model_hash;
  } catch (const Error&) {
    return false;
  }
}

/// Gives the file that is about to be replaced a second name, cache.4096.h5 for cache.h5, or makes
/// a copy on file systems without hard links. Returns the reason if that fails; a long run should
/// not end for it.
std::string Snapshots::keep_older() const {
  if (m_options.snapshot_keep.value_or(1) == 1) return "";
  const fs::path file = m_options.snapshot;
  std::int64_t tokens = 0;
  try {
    tokens = SnapshotReader(file).header().tokens;
  } catch (const Error&) {
    return "";  // no file, or no snapshot
  }
  if (!is_ours(file, tokens)) return "";
  const fs::path older = file.parent_path() / fmt::format("{}.{}{}", file.stem().string(), tokens,
                                                          file.extension().string());
  std::error_code failed;
  if (fs::equivalent(file, older, failed)) return "";
  if (is_ours(older, tokens)) fs::remove(older, failed);
  // A hard link to a symbolic link would lead to the new file, not to the old one.
  fs::create_hard_link(files::target_of_links(file), older, failed);
  if (!failed) return "";
  std::string what = failed.message();
  if (failed != std::errc::file_exists) {
    try {
      copy_whole(file, older);
      return "";
    } catch (const std::exception& error) {
      what += fmt::format("; nor copied: {}", error.what());
    }
  }
  return fmt::format("--snapshot-keep: {} of {} tokens cannot be kept as {}: {}", file.string(),
                     tokens, older.string(), what);
}

/// Removes all older snapshots but the newest --snapshot-keep.
void Snapshots::remove_older() const {
  if (!m_options.snapshot_keep) return;
  const fs::path file = m_options.snapshot;
  const fs::path folder = file.parent_path().empty() ? "." : file.parent_path();
  const std::string begin = file.stem().string() + ".";
  const std::string end = file.extension().string();
  std::vector<std::pair<fs::file_time_type, fs::path>> older;
  // ignored: the folder may not be readable, or another process has just removed a file
  std::error_code failed;
  fs::directory_iterator entry(folder, failed);
  for (; !failed && entry != fs::directory_iterator(); entry.increment(failed)) {
    const std::string name = entry->path().filename().string();
    if (name.size() <= begin.size() + end.size() || name.rfind(begin, 0) != 0 ||
        name.compare(name.size() - end.size(), end.size(), end) != 0) {
      continue;
    }
    const std::string digits = name.substr(begin.size(), name.size() - begin.size() - end.size());
    constexpr std::size_t most_digits = 18;  // of 64 bits
    if (digits.size() > most_digits || digits.find_first_not_of("0123456789") != std::string::npos)
      continue;
    std::error_code gone;
    const auto written_at = entry->last_write_time(gone);
    if (!gone && is_ours(entry->path(), std::stoll(digits))) {
      older.emplace_back(written_at, entry->path());
    }
  }
  std::sort(older.begin(), older.end(), [](const auto& a, const auto& b) { return a > b; });
  for (std::size_t i = *m_options.snapshot_keep - 1; i < older.size(); ++i) {
    fs::remove(older[i].second, failed);
    if (failed) {
      tell({fmt::format("{}: cannot be removed: {}", older[i].second.string(), failed.message())});
    }
  }
}

}  // namespace kvzap::driver
