// Snapshots of `kvzap run`: what a run says of itself in them, when it writes them, and how another
// one goes on from there.
#pragma once

#include <CLI/CLI.hpp>
#include <filesystem>
#include <functional>
#include <kvzap/engine/generate.hpp>
#include <kvzap/engine/snapshot.hpp>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/stopwatch.hpp"
#include "commands/model_loading.hpp"
#include "commands/prompt.hpp"
#include "commands/report.hpp"
#include "console/progress.hpp"
#include "console/signals.hpp"
#include "options/options.hpp"
#include "options/policy_options.hpp"

namespace kvzap::driver {

/// The options that shape a run, as JSON: {"long flag": value}, those of inputs, outputs and
/// machines left out. `app` is `kvzap run`, parsed into `options`.
std::string recorded_options(const CLI::App& app, const RunOptions& options);

/// Every option of a run, as JSON: {"long flag": value in force, or null}. `app` is `kvzap run`,
/// parsed into `options`.
std::string options_in_force(const CLI::App& app, const RunOptions& options);

/// What the policy of a run is, whatever the names of the files that it reads; empty without one.
/// Reads those files. Throws Error as parse_policy does.
std::string identity_of_policy(const Pruning& pruning);

/// Attributes of a snapshot that say which surrogate has scored its rows.
inline constexpr const char* surrogate_folder_attribute = "surrogate_folder";
inline constexpr const char* surrogate_hash_attribute = "surrogate_hash";

/// The text of a further attribute; empty: the snapshot has none.
std::string further_text(const SnapshotInfo& info, const char* name);

/// The surrogate of a run, wherever its options name it.
struct SurrogateIdentity {
  std::string folder;  // absolute; empty: there is none
  std::string hash;    // as identity_of_policy has it
};
/// Reads the folder's files. Throws Error as parse_policy does.
SurrogateIdentity identity_of_surrogate(const Pruning& pruning);

/// How far a run is, apart from its cache and the answer under way.
struct RunState {
  /// The questions' texts (none: the template's end, or nothing, was asked), and their ids.
  std::vector<std::string> texts;
  std::vector<std::vector<TokenId>> questions;
  /// Those that are at their end, in order.
  std::vector<AnsweredQuestion> answers;
  /// The context's cache, once it is pruned.
  std::optional<CacheReport> context;
  /// Type of the values that these reports count the bytes of.
  DType dtype = DType::f32;
  /// identity_of_policy.
  std::string policy;
  /// Hash of the model's generation_config.json; "" if it has none. Absent in older snapshots.
  std::optional<std::string> generation;
  std::optional<LookedUpThreshold> looked_up;
};
/// As the snapshot's attribute run_state.
std::string to_json_text(const RunState& state);

/// The run that --resume goes on with.
struct ResumedRun {
  SnapshotReader reader;
  RunState state;
  ModelHashes hashes;  // on rank 0

  /// Context and questions.
  Prompt prompt() const;
};

/// Opens the snapshot that options.resume names, if it names one, and completes the options by
/// those that the file has recorded: what neither the command line nor the deck has set. `app` is
/// `kvzap run`, parsed into `options`. Collective. Throws AgreedError for a file from which no run
/// can go on, options on which its rows depend and that were given otherwise, another model,
/// tokenizer or policy.
std::unique_ptr<ResumedRun> open_resumed(CLI::App& app, RunOptions& options,
                                         const Communicator& comm);
/// Opens a snapshot that a run under way is to go on with: of the same model and policy, by options
/// with which its rows would be the same. `recorded`: the run's recorded_options; `info`: what its
/// own snapshots say (on rank 0); `state`: its own. Collective. Throws AgreedError as open_resumed.
std::unique_ptr<ResumedRun> open_fitting(const std::string& file, const std::string& recorded,
                                         const SnapshotInfo& info, const RunState& state,
                                         DType dtype, const Communicator& comm);

/// The snapshots that a run writes; none if its options name no file. All ranks make the same
/// calls in the same order.
class Snapshots {
 public:
  /// `info` has what stays the same throughout the run. `run_state` is called on rank 0 alone when
  /// one is written. `written` gets what was written, on every rank.
  Snapshots(const RunOptions& options, SnapshotInfo info, const Communicator& comm, Progress& bar,
            std::function<std::string()> run_state, std::vector<WrittenSnapshot>& written);

  bool is_on() const { return !m_options.snapshot.empty(); }
  /// The context has been run, or there is something else to be kept: writes it. Waits for it
  /// unless there will be more of them.
  void write(Generator& generator);
  /// `tokens` more have been run, and the cache is whole: goes on with what is being written, or
  /// begins if it is time. Throws Interrupted if a signal has asked for the end,
  /// once that is written.
  void after_step(Generator& generator, std::int64_t tokens);
  /// Waits for what is being written.
  void finish();

 private:
  void begin(Generator& generator, bool waits);
  void end();
  void tell(const std::vector<std::string>& notes) const;
  bool is_ours(const std::filesystem::path& file, std::int64_t tokens) const;
  std::string keep_older() const;
  void remove_older() const;

  const RunOptions& m_options;
  SnapshotInfo m_info;
  SnapshotOptions m_how;
  Communicator m_comm;
  Progress& m_bar;
  std::function<std::string()> m_run_state;
  std::vector<WrittenSnapshot>& m_written;
  std::unique_ptr<SnapshotWriting> m_writing;
  detail::Clock::time_point m_start;  // of m_writing
  double m_waiting_seconds = 0;
  std::int64_t m_since = 0;  // tokens since the last one
};

}  // namespace kvzap::driver
