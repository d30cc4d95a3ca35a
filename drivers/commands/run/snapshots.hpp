// Writes the snapshots of `kvzap run`, and decides when.
#pragma once

#include <cstdint>
#include <filesystem>
#include <kvzap/core/communicator.hpp>
#include <kvzap/engine/generate.hpp>
#include <kvzap/engine/snapshot.hpp>
#include <memory>
#include <string>
#include <vector>

#include "base/stopwatch.hpp"
#include "commands/run/report.hpp"
#include "console/progress.hpp"
#include "options/options.hpp"
#include "session/conversation.hpp"

namespace kvzap::driver {

/// Writes a run's snapshots; does nothing if its options name no file. All ranks make the same
/// calls in the same order.
class Snapshots {
 public:
  /// Snapshots of `conversation`. Each written file is added to `written`, on every rank.
  Snapshots(const RunOptions& options, const session::Conversation& conversation,
            const Communicator& comm, Progress& bar, std::vector<WrittenSnapshot>& written);

  bool is_on() const { return !m_options.snapshot.empty(); }
  /// Writes a snapshot now, as after the context's prefill. Waits until it is written, unless
  /// --snapshot-every requests more snapshots.
  void write();
  /// Call it after each step of `tokens` tokens, when the cache is complete. Continues the snapshot
  /// that is being written, or begins one that is due. After a signal, writes a last one and throws
  /// Interrupted.
  void after_step(std::int64_t tokens);
  /// Waits until the snapshot being written is complete.
  void finish();

 private:
  void begin(bool waits);
  void end();
  void tell(const std::vector<std::string>& notes) const;
  bool is_ours(const std::filesystem::path& file, std::int64_t tokens) const;
  std::string keep_older() const;
  void remove_older() const;

  const RunOptions& m_options;
  const session::Conversation& m_conversation;
  SnapshotOptions m_how;
  Communicator m_comm;
  Progress& m_bar;
  std::vector<WrittenSnapshot>& m_written;
  std::unique_ptr<SnapshotWriting> m_writing;
  base::Clock::time_point m_start;  // start of m_writing
  double m_waiting_seconds = 0;
  std::int64_t m_since = 0;  // tokens since the last snapshot
};

}  // namespace kvzap::driver
