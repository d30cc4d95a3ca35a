// What a snapshot says about the conversation whose cache it holds. `kvzap run`, `kvzap chat` and
// Session write the same attributes, and each continues from the files of the others.
#pragma once

#include <cstdint>
#include <kvzap/core/communicator.hpp>
#include <kvzap/engine/pruning.hpp>
#include <kvzap/engine/snapshot.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "session/conversation_state.hpp"
#include "session/model_files.hpp"

namespace kvzap::session {

/// Returns an option as text; empty if it is not among the options.
std::string text_in(const nlohmann::json& options, const std::string& name);

/// A snapshot of a conversation.
struct Recorded {
  SnapshotReader reader;
  /// {"long flag of kvzap run": value}: the options on which its rows depend, and others.
  nlohmann::json options;
  ConversationState state;
  ModelHashes hashes;  // of the model's present files; rank 0's, set by check_model_files

  const SnapshotInfo& info() const { return reader.header().info; }
  /// Returns the ids of the whole context.
  std::vector<TokenId> context() const;
  std::string text(const std::string& option) const { return text_in(options, option); }
  /// Returns an option that is a number, or a number's text, if it is recorded. Throws Error for
  /// another value.
  std::optional<double> real(const char* option) const;
  /// The same for whole numbers that are not negative.
  std::optional<std::uint64_t> whole(const char* option) const;
  /// Returns whether an older Session::save wrote the file: with fewer options, and no identity of
  /// the policy.
  bool is_older() const { return info().further.count("session_pruning") > 0; }
  /// Returns the pruning of the options, with the threshold that was looked up. Throws Error as
  /// Pruning::parse does.
  Pruning pruning() const;
  /// Replaces an auto_window by the window of the recorded run.
  void restore_window(Pruning& pruning) const;
};

/// Attributes that name the surrogate which scored the rows.
inline constexpr const char* surrogate_folder_attribute = "surrogate_folder";
inline constexpr const char* surrogate_hash_attribute = "surrogate_hash";
/// Returns the text of an attribute in info.further; empty if the snapshot has none.
std::string further_text(const SnapshotInfo& info, const char* name);

/// Opens a snapshot on all ranks. Collective. Throws AgreedError for a file from which no
/// conversation can continue, and if ranks see different files.
std::unique_ptr<Recorded> open_recorded(const std::string& file, const Communicator& comm);

/// Checks that the model in the folder, its tokenizer and its generation_config.json are those with
/// which the snapshot was written. For one process; reads their files. Throws Error.
void check_model_files(Recorded& recorded, const std::string& model, bool has_weights);
/// Does the same for the files of a policy: the pruning is the snapshot's, but they may have moved.
void check_policy_files(const Recorded& recorded, const Pruning& pruning,
                        const PruningNames& names = plain_names());

/// Returns the settings of a pruning as options of `kvzap run`, with the defaults of those that
/// always have a value.
nlohmann::ordered_json options_of(const Pruning& pruning);

/// Sets the hashes of `info`, of a model's files and of its surrogate, and those of `state`. For
/// one process; reads the files. Throws Error as Pruning::spec does.
void set_hashes(SnapshotInfo& info, ConversationState& state, const ModelHashes& hashes,
                const Pruning& pruning, const PruningNames& names = plain_names());

/// Returns policy and arguments, with hashes in place of file names; empty if nothing is pruned.
/// Reads those files. Throws Error as Pruning::spec does.
std::string identity_of_policy(const Pruning& pruning, const PruningNames& names = plain_names());

/// Returns pruning.policy with absolute paths, because another process may start in another folder.
/// A policy with errors stays as it is.
PolicyText absolute_policy(const Pruning& pruning, const PruningNames& names = plain_names());
/// Returns the absolute path of a file or folder, or the given path if it cannot be made absolute.
std::string absolute_path(const std::string& file);

}  // namespace kvzap::session
