// Options of `kvzap run`, from flags or a deck; decks and messages of every command.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <kvzap/engine/generate.hpp>
#include <kvzap/engine/pruning.hpp>
#include <optional>
#include <string>
#include <vector>

#include "console/progress.hpp"
#include "options/answer_form.hpp"
#include "options/rope_options.hpp"
#include "options/sampling_options.hpp"
#include "options/usage.hpp"

namespace kvzap::driver {

/// Flags whose texts describe parts of a Pruning.
struct PruningTexts {
  std::string policy;
  std::string threshold;  // a number, or auto
  std::string kv_budget;
  std::string prune;  // empty: prefill with a policy, none without
  std::string prune_after = "context";
  std::string prefill = "dense";
};

/// Options of every command that runs a model with a pruned cache.
struct EngineOptions {
  std::string model;
  std::string dtype = "bf16";
  std::string kv_type;  // empty: as dtype
  std::string read_pages = "all";
  std::string placement;
  double balance = default_balance;
  std::optional<std::int64_t> threads;  // absent: the cores that this rank may use
  std::optional<std::int64_t> layers;   // absent: all
  RopeOptions rope;
  std::string weights = "stored";
  std::optional<std::uint64_t> random_weights;

  /// Valid once resolve_pruning has read the texts.
  Pruning pruning;
  PruningTexts pruning_texts;
  bool takes_recommended = false;  // see take_recommended
  int page_rows = 64;

  bool token_ids = false;  // prompts are token ids
  bool raw = false;        // no chat template
  std::string thinking = "off";
  std::optional<std::int64_t> max_context;  // absent: the model's

  bool quiet = false;
  ProgressStyle progress = ProgressStyle::automatic;
  std::string config;
};

/// The number of new tokens that ends an answer at a stop token or at the context's end alone.
constexpr std::int64_t until_end = -1;

/// Options of `kvzap run`. `kvzap chat` uses all but the questions, the dump and the snapshots' own
/// options.
struct RunOptions : EngineOptions {
  bool trim = true;

  std::optional<std::string> prompt;
  std::vector<std::string> files;
  std::string separator = "\n\n";  // between files, and between context and question
  std::vector<std::string> questions;
  std::string questions_file;  // empty: none
  std::optional<std::string> system;

  std::int64_t new_tokens = 128;
  bool ignore_eos = false;
  bool no_history = false;   // of `kvzap chat`
  SamplingOptions sampling;  // penalties as given; see sampling_in_force
  SamplingFlags sampling_flags;
  AnswerForm form;
  std::int64_t lookup = 0;

  std::string json;
  bool json_token_ids = false;
  bool layer_table = false;
  std::string snapshot;
  std::optional<std::int64_t> snapshot_every;
  std::optional<std::int64_t> snapshot_keep;
  std::string snapshot_content;          // empty: all
  std::optional<int> snapshot_compress;  // absent: the content's default
  std::string snapshot_dtype;            // empty: the cache's
  std::string resume;
  std::string append;
  std::string dump;
  bool dry_run = false;
};

/// A CLI11 check that refuses negative numbers: CLI11 reads -1 as the largest unsigned number.
std::string not_negative(const std::string& text);

/// Declares --seed of a command that samples. `set` receives the number, or nothing for -1, which
/// stands for a random seed; `usual` is the default in the help, and may be empty.
void declare_seed(CLI::App& app, const std::function<void(std::optional<std::uint64_t>)>& set,
                  const std::string& usual, const std::string& help, const std::string& group);

/// Declares --page-rows, and throws Error for a value out of range.
void declare_page_rows(CLI::App& app, int& page_rows, const std::string& group);
void check_page_rows(int page_rows);
/// Declares --balance, and throws Error for a value out of range.
void declare_balance(CLI::App& app, double& balance, const char* group);
void check_balance(double balance);
/// The --kv-type that chooses one for --kv-budget.
constexpr const char* kv_type_auto = "auto";
/// Declares --kv-type.
void declare_kv_type(CLI::App& app, std::string& kv_type, const std::string& group);
/// Returns the format that --kv-type names. Throws Error for another text.
PageFormat page_format(const std::string& kv_type, const std::string& dtype);
/// Returns the name of that format, such as "q8" or "bf16".
std::string kv_type_name(const std::string& kv_type, const std::string& dtype);

/// Declares --read-pages.
void declare_read_pages(CLI::App& app, std::string& text, const std::string& group);
/// Returns what --read-pages says. Throws Error for a text that says nothing.
ReadPages read_pages(const std::string& text);
/// Returns the rows of pages whose bounds are kept, as MemoryDemand::bounded_page_rows: 0 if all
/// pages are read.
int bounded_page_rows(const std::string& read_pages, int page_rows);

/// Declares options of several commands: --dtype (f32, bf16, f16), --weights, --random-weights.
void declare_dtype(CLI::App& app, std::string& dtype, const std::string& help,
                   const std::string& group);
void declare_weights(CLI::App& app, std::string& weights, const std::string& group);
void declare_random_weights(CLI::App& app, std::optional<std::uint64_t>& seed,
                            const std::string& help, const std::string& group);
/// --threads, also -t, which takes 1 to 4096.
void declare_threads(CLI::App& app, std::optional<std::int64_t>& threads, const std::string& group);
/// --rope-scaling and --rope-scale.
void declare_rope(CLI::App& app, RopeOptions& rope, const std::string& group);
/// --thinking (on, off), and --raw with it.
void declare_thinking(CLI::App& app, std::string& thinking, const std::string& group);
void declare_template(CLI::App& app, bool& raw, std::string& thinking, const std::string& group);
/// --top-k, --top-p and --min-p.
void declare_filters(CLI::App& app, SamplingOptions& sampling, const std::string& group);
/// Declares --window, a number of tokens or auto.
void declare_window(CLI::App& app, int& window, bool& is_auto, const std::string& help,
                    const std::string& group);
/// Declares --window and --sink: rows that a threshold never evicts.
void declare_protected(CLI::App& app, Pruning& pruning, const std::string& group);
/// --config.
void declare_deck(CLI::App& app, std::string& deck, const std::string& group);

/// Declare the options of EngineOptions, by groups: the model; thinking and -c; pruning.
void declare_model(CLI::App& app, EngineOptions& options);
void declare_context(CLI::App& app, EngineOptions& options);
void declare_pruning(CLI::App& app, EngineOptions& options);
/// --progress, -q and --config.
void declare_console(CLI::App& app, EngineOptions& options);
/// Declares the options that `kvzap run` and `kvzap chat` share: the context, answers, the report.
/// `moments`: values of --prune-after.
void declare_conversation(CLI::App& app, RunOptions& options,
                          const std::vector<std::string>& moments);
/// --resume.
void declare_resume(CLI::App& app, RunOptions& options);
/// Declares every option of `kvzap run` on `app`; parsing fills `options`.
void declare(CLI::App& app, RunOptions& options);

/// Sets the options that the deck `file` (TOML) names and the command line did not. Keys are the
/// long flags without their dashes. Throws Error that names file, line and key for an unknown key
/// (with the nearest valid one), and for a value of the wrong type or out of range. Text that is
/// not TOML is an error, too. All are UsageErrors.
void read_deck(CLI::App& app, const std::string& file);

/// Returns a message for an invalid value of an option, with the expected values.
std::string explain(const CLI::App& app, const CLI::ParseError& error);

/// Throws Error that names the flag for options that are out of range or contradict one another.
void validate(const EngineOptions& options, const PruningUse& use);
/// Checks the options of a run. `needs_prompt`: without a snapshot to resume, a prompt must be
/// given.
void validate(const RunOptions& options, bool needs_prompt);

}  // namespace kvzap::driver
