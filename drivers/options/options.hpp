// What `kvzap run` can be told, by flags or by a deck; decks and messages of every subcommand.
#pragma once

#include <CLI/CLI.hpp>
#include <kvzap/engine/generate.hpp>
#include <kvzap/engine/pruning.hpp>
#include <optional>
#include <string>
#include <vector>

#include "console/progress.hpp"
#include "options/rope_options.hpp"
#include "options/sampling_options.hpp"

namespace kvzap::driver {

/// Flags that are texts of parts of a Pruning.
struct PruningTexts {
  std::string policy;
  std::string kv_budget;
  std::string prune;  // empty: prefill with a policy, none without
  std::string prune_after = "context";
  std::string prefill = "dense";
};

struct RunOptions {
  std::string model;
  /// Complete once resolve_pruning has read the texts.
  Pruning pruning;
  PruningTexts pruning_texts;
  bool trim = true;
  int page_rows = 64;
  std::string dtype = "bf16";
  std::string placement;
  std::optional<std::int64_t> threads;  // absent: as many as this rank has cores for
  std::optional<std::int64_t> layers;   // absent: all
  RopeOptions rope;

  std::optional<std::string> prompt;
  std::string file;
  std::vector<std::string> questions;
  std::optional<std::string> system;
  /// Of `kvzap chat`: what there is to say is not known at the start, so that no prompt is needed.
  bool chats = false;
  bool token_ids = false;
  bool raw = false;
  std::string thinking = "off";
  std::optional<std::int64_t> max_context;  // absent: what the model was made for

  std::int64_t new_tokens = 128;
  bool ignore_eos = false;
  SamplingOptions sampling;  // of its penalties by the model, see sampling_in_force
  SamplingFlags sampling_flags;

  std::optional<std::uint64_t> random_weights;
  std::string json;
  bool json_token_ids = false;
  std::string snapshot;
  std::optional<std::int64_t> snapshot_every;
  std::optional<std::int64_t> snapshot_keep;
  std::string snapshot_content;          // empty: all
  std::optional<int> snapshot_compress;  // absent: what suits the content
  std::string snapshot_dtype;            // empty: the cache's
  std::string resume;
  std::string append;
  std::string dump;
  bool dry_run = false;
  bool quiet = false;
  ProgressStyle progress = ProgressStyle::automatic;
  std::string config;
};

/// Refuses numbers below zero, as a CLI11 check: CLI11 takes -1 for the largest unsigned number.
std::string not_negative(const std::string& text);

/// Throws Error with the message unless `good`.
void require(bool good, const std::string& message);
/// What every command asks of these options; throws Error naming the flag.
void check_threshold(const std::optional<double>& threshold);
void check_page_rows(int page_rows);

/// Options that several commands have: --dtype (f32, bf16, f16), --random-weights.
void declare_dtype(CLI::App& app, std::string& dtype, const std::string& help,
                   const std::string& group);
void declare_random_weights(CLI::App& app, std::optional<std::uint64_t>& seed,
                            const std::string& help, const std::string& group);
/// --threads, also -t.
void declare_threads(CLI::App& app, std::optional<std::int64_t>& threads, const std::string& group);
/// --rope-scaling and --rope-scale.
void declare_rope(CLI::App& app, RopeOptions& rope, const std::string& group);
/// --raw and --thinking (on, off).
void declare_template(CLI::App& app, bool& raw, std::string& thinking, const std::string& group);
/// --top-k, --top-p and --min-p.
void declare_filters(CLI::App& app, SamplingOptions& sampling, const std::string& group);
/// --window and --sink: what a threshold never evicts.
void declare_protected(CLI::App& app, int& window, std::int64_t& sink, const std::string& group);
/// --config.
void declare_deck(CLI::App& app, std::string& deck, const std::string& group);

/// Declares every option of `kvzap run` on `app`; parsing fills `options`.
void declare(CLI::App& app, RunOptions& options);

/// Sets the options that the deck `file` (TOML) names and the command line did not. Keys are the
/// long flags without their dashes. Throws Error naming file, line and key: for an unknown key
/// (with the nearest valid one), a value of the wrong type or out of range, and text that is not
/// TOML.
void read_deck(CLI::App& app, const std::string& file);

/// The long option name of `app` that is spelled most like `name`, or "" if none is near.
std::string nearest_option(const CLI::App& app, const std::string& name);

/// What is wrong with an option's value, and what was expected instead.
std::string explain(const CLI::App& app, const CLI::ParseError& error);

/// Throws Error, naming the flag, for options that are out of range or contradict one another.
void validate(const RunOptions& options);

}  // namespace kvzap::driver
