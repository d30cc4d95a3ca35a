#include "options/options.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "files/decimal.hpp"
#include "files/nearest.hpp"
#include "options/policy_options.hpp"
#include "options/recording.hpp"
#include "options/strict_values.hpp"

namespace kvzap::driver {

std::string not_negative(const std::string& text) {
  return text.find('-') == std::string::npos ? "" : "is " + text + "; expected 0 or more";
}

void declare_seed(CLI::App& app, const std::function<void(std::optional<std::uint64_t>)>& set,
                  const std::string& usual, const std::string& help, const std::string& group) {
  CLI::Option* const option = app.add_option(
      "--seed",
      [set](const CLI::results_t& given) {
        std::uint64_t seed = 0;
        const bool is_random = given.front() == "-1";
        if (!is_random && files::read_whole(given.front(), seed) != files::DecimalFault::none) {
          return false;
        }
        set(is_random ? std::nullopt : std::optional<std::uint64_t>(seed));
        return true;
      },
      help + "; -1: a random seed");
  option->type_name("SEED")->group(group);
  if (!usual.empty()) option->default_str(usual);
}

void declare_balance(CLI::App& app, double& balance, const char* group) {
  app.add_option(
         "--balance", balance,
         "move pages of the cache between ranks when the rank with most rows of a layer has "
         "more than 1 + FLOAT times the mean; 0: rows stay with the rank that owns their KV "
         "head")
      ->capture_default_str()
      ->check(not_recorded())
      ->group(group);
}

void check_balance(double balance) {
  require(balance >= 0 && balance <= 1000,
          fmt::format("--balance is {}; expected 0 to 1000", balance));
}

void declare_page_rows(CLI::App& app, int& page_rows, const std::string& group) {
  app.add_option("--page-rows", page_rows, "rows of a cache page; 1 to 1048576")
      ->capture_default_str()
      ->check(may_change())
      ->group(group);
}

void check_page_rows(int page_rows) {
  require(page_rows >= 1 && page_rows <= (1 << 20),
          fmt::format("--page-rows is {}; expected 1 to {}", page_rows, 1 << 20));
}

void declare_kv_type(CLI::App& app, std::string& kv_type, const std::string& group) {
  app.add_option(
         "--kv-type", kv_type,
         "type of keys and values that have left the window: q8 (8 bits), q4, q3, q2, two of "
         "them for keys and values, as in q8,q4, or that of --dtype; default: --dtype")
      ->type_name("TYPE")
      ->check(may_change())
      ->group(group);
}

PageFormat page_format(const std::string& kv_type, const std::string& dtype) {
  if (kv_type.empty()) return {};
  try {
    return page_format_from_name(kv_type, dtype_from_name(dtype));
  } catch (const Error& error) {
    // llama.cpp's names, such as q8_0
    const std::string near = files::lower_case(kv_type).substr(0, 2);
    const bool is_near = std::any_of(std::begin(quantised_types), std::end(quantised_types),
                                     [&](RowType type) { return name_of(type) == near; });
    throw Error(fmt::format("--kv-type: {}{}", error.what(),
                            is_near ? "; did you mean " + near + "?" : ""));
  }
}

void declare_read_pages(CLI::App& app, std::string& text, const std::string& group) {
  app.add_option("--read-pages", text,
                 "while decoding, read only the pages of each KV head that can have the largest "
                 "scores: a number of pages, or a share of them with a point, such as 0.25; the "
                 "newest rows are always read, and no pair is evicted; all: every page")
      ->type_name("PAGES")
      ->capture_default_str()
      ->check(may_change())
      ->group(group);
}

ReadPages read_pages(const std::string& text) {
  try {
    return read_pages_from_name(text);
  } catch (const Error& error) {
    throw Error(fmt::format("--read-pages {}", error.what()));
  }
}

int bounded_page_rows(const std::string& text, int page_rows) {
  return read_pages(text).all() ? 0 : page_rows;
}

std::string kv_type_name(const std::string& kv_type, const std::string& dtype) {
  return name_of(page_format(kv_type, dtype), dtype_from_name(dtype));
}

namespace {

/// Replaces the names of other programs, in any case, by kvzap's. `automatic`: the default.
std::string own_name_of(std::string& name, const std::map<std::string, std::string>& names,
                        const std::string& automatic) {
  const std::string lower = files::lower_case(name);
  if (lower == "auto") return "is auto, which kvzap does not know; the default is " + automatic;
  const auto found = names.find(lower);
  if (found != names.end()) name = found->second;
  return "";
}

std::string own_dtype_name(std::string& name) {
  return own_name_of(name,
                     {{"float32", "f32"},
                      {"float", "f32"},
                      {"fp32", "f32"},
                      {"f32", "f32"},
                      {"float16", "f16"},
                      {"half", "f16"},
                      {"fp16", "f16"},
                      {"f16", "f16"},
                      {"bfloat16", "bf16"},
                      {"bf16", "bf16"}},
                     "bf16");
}

std::string own_weights_name(std::string& name) {
  return own_name_of(name, {{"q8_0", "q8"}, {"q4_k_m", "q4"}}, "stored");
}

}  // namespace

void declare_dtype(CLI::App& app, std::string& dtype, const std::string& help,
                   const std::string& group) {
  app.add_option("--dtype", dtype, help)
      ->capture_default_str()
      ->transform(CLI::Validator(own_dtype_name, ""))
      ->check(CLI::IsMember({"f32", "bf16", "f16"}))
      ->check(may_change())
      ->group(group);
}

void declare_weights(CLI::App& app, std::string& weights, const std::string& group) {
  app.add_option(
         "--weights", weights,
         "how weights are kept in memory: stored (quantised ones in their blocks), unpacked "
         "(all as --dtype), q8 or q4 (made 8-bit, Q8_0, or 4-bit, Q4_K_M, at load)")
      ->capture_default_str()
      ->transform(CLI::Validator(own_weights_name, ""))
      ->check(CLI::IsMember({"stored", "unpacked", "q8", "q4"}))
      ->group(group);
}

void declare_random_weights(CLI::App& app, std::optional<std::uint64_t>& seed,
                            const std::string& help, const std::string& group) {
  app.add_option("--random-weights", seed, help)
      ->type_name("SEED")
      ->check(not_negative)
      ->group(group);
}

void declare_threads(CLI::App& app, std::optional<std::int64_t>& threads,
                     const std::string& group) {
  app.add_option("-t,--threads", threads,
                 "threads of each rank, 1 to 4096; default: OMP_NUM_THREADS, else the cores that "
                 "this rank is bound to, or its share of the node's cores")
      ->check([](const std::string& text) {
        std::int64_t count = 0;
        const bool is_good = files::read_whole(text, count) == files::DecimalFault::none &&
                             count >= 1 && count <= 4096;
        return is_good ? ""
                       : fmt::format(
                             "is {}; expected 1 to 4096; without it: all cores of this rank", text);
      })
      ->check(not_recorded())
      ->group(group);
}

void declare_rope(CLI::App& app, RopeOptions& rope, const std::string& group) {
  app.add_option(
         "--rope-scaling", rope.scaling,
         "scale RoPE by --rope-scale, for texts longer than the model's max_position_embeddings; "
         "none: also ignore the scaling of config.json; default: the scaling of config.json")
      ->check(CLI::IsMember({"none", "linear", "dynamic", "yarn"}))
      ->group(group);
  app.add_option("--rope-scale", rope.scale, "factor by which texts may be longer; at least 1")
      ->type_name("FACTOR")
      ->group(group);
}

void declare_thinking(CLI::App& app, std::string& thinking, const std::string& group) {
  app.add_option("--thinking", thinking, "let a Qwen3 model think before it answers")
      ->capture_default_str()
      ->check(CLI::IsMember({"on", "off"}))
      ->check(may_change())
      ->group(group);
}

void declare_template(CLI::App& app, bool& raw, std::string& thinking, const std::string& group) {
  app.add_flag("--raw", raw, "use no chat template; BOS only if the tokenizer adds one")
      ->check(may_change())
      ->group(group);
  declare_thinking(app, thinking, group);
}

void declare_filters(CLI::App& app, SamplingOptions& sampling, const std::string& group) {
  app.add_option("--top-k", sampling.top_k, "sample from the k most likely tokens; 0: all")
      ->capture_default_str()
      ->group(group);
  app.add_option("--top-p", sampling.top_p,
                 "sample from the most likely tokens whose probabilities sum to this, in (0, 1]")
      ->capture_default_str()
      ->group(group);
  app.add_option("--min-p", sampling.min_p,
                 "sample from tokens with at least this fraction of the largest probability, in "
                 "[0, 1]; 0: all")
      ->capture_default_str()
      ->group(group);
}

void declare_window(CLI::App& app, int& window, bool& is_auto, const std::string& help,
                    const std::string& group) {
  app.add_option(
         "--window",
         [&window, &is_auto](const CLI::results_t& given) {
           is_auto = given.back() == "auto";
           return is_auto || files::read_whole(given.back(), window) == files::DecimalFault::none;
         },
         help)
      ->default_str(std::to_string(window))
      ->type_name("TOKENS")
      ->group(group);
}

void declare_protected(CLI::App& app, Pruning& pruning, const std::string& group) {
  declare_window(app, pruning.window, pruning.auto_window,
                 "most recent tokens that a threshold always keeps; at least 1. auto: the window "
                 "that kvzap calibrate has recommended in the surrogate's folder; for an evict "
                 "ratio the largest calibrated one that takes at most a quarter of the rows that "
                 "stay; if generated tokens are judged too, the largest calibrated one",
                 group);
  app.add_option("--sink", pruning.sink,
                 "first positions to keep: always with a threshold, first of all with a budget")
      ->capture_default_str()
      ->group(group);
}

void declare_deck(CLI::App& app, std::string& deck, const std::string& group) {
  app.add_option("--config", deck,
                 "TOML deck with any of these options, by their long names; flags override it")
      ->type_name("DECK")
      ->group(group);
}

namespace {

// Rejects an empty name: an unset variable of a script must not lead to a run without snapshots.
std::string file_name(const std::string& text) {
  return text.empty() ? "the name is empty; expected a file" : "";
}

void declare_snapshots(CLI::App& app, RunOptions& o) {
  const auto group = "Snapshots";
  app.add_option(
         "--snapshot", o.snapshot,
         "write the cache to this HDF5 file after the context, and again if SIGTERM, SIGINT, "
         "SIGHUP or SIGUSR1 ends the run; the exit status is then 128 + the signal's number")
      ->check(file_name)
      ->type_name("FILE")
      ->group(group);
  app.add_option("--snapshot-every", o.snapshot_every,
                 "also write it after every INT tokens of context (only in sparse prefill), "
                 "question and answer, in the background; at least 1")
      ->group(group);
  app.add_option("--snapshot-keep", o.snapshot_keep,
                 "number of newest snapshots to keep: the file itself, and earlier ones with their "
                 "tokens in the name, such as cache.4096.h5; at least 1; default: 1")
      ->group(group);
  app.add_option("--snapshot-content", o.snapshot_content,
                 "data to write for each row: its position; also its score; or all, with key and "
                 "value, which --resume needs; default: all")
      ->check(CLI::IsMember({"positions", "scores", "all"}))
      ->group(group);
  app.add_option("--snapshot-compress", o.snapshot_compress,
                 "deflate level of the rows, 1 to 9; 0: no compression; default: 0, or 6 without "
                 "keys and values")
      ->type_name("LEVEL")
      ->group(group);
  app.add_option("--snapshot-dtype", o.snapshot_dtype,
                 "value type of keys and values in the file; default: that of the cache, so "
                 "that quantised rows stay quantised")
      ->check(CLI::IsMember({"f32", "f16", "bf16"}))
      ->group(group);
  app.add_option("--append", o.append,
                 "file with more context, read as -f, that follows the context of --resume; its "
                 "questions are then asked again; - is standard input")
      ->check(file_name)
      ->type_name("FILE")
      ->group(group);
}

void check_snapshot_options(const RunOptions& o) {
  const std::pair<const char*, bool> needs_file[] = {
      {"--snapshot-every", o.snapshot_every.has_value()},
      {"--snapshot-keep", o.snapshot_keep.has_value()},
      {"--snapshot-content", !o.snapshot_content.empty()},
      {"--snapshot-compress", o.snapshot_compress.has_value()},
      {"--snapshot-dtype", !o.snapshot_dtype.empty()}};
  for (const auto& [flag, is_given] : needs_file) {
    require(!is_given || !o.snapshot.empty(),
            fmt::format("{} has no effect without --snapshot FILE", flag));
  }
  require(o.snapshot != "-", "--snapshot cannot be standard output");
  require(o.resume != "-", "--resume cannot be standard input");
  const auto check_count = [](const std::optional<std::int64_t>& count, const char* flag) {
    require(!count || *count >= 1,
            fmt::format("{} is {}; expected at least 1", flag, count.value_or(0)));
  };
  check_count(o.snapshot_every, "--snapshot-every");
  check_count(o.snapshot_keep, "--snapshot-keep");
  const int level = o.snapshot_compress.value_or(0);
  require(level >= 0 && level <= 9,
          fmt::format("--snapshot-compress is {}; expected 0 to 9", level));
  const bool has_values = o.snapshot_content.empty() || o.snapshot_content == "all";
  require(has_values || o.snapshot_dtype.empty(),
          fmt::format("--snapshot-dtype has no effect with --snapshot-content {}: no keys and "
                      "values are written",
                      o.snapshot_content));
  require(o.append.empty() || !o.resume.empty(),
          "--append needs --resume FILE, because it adds to that context; give the context of a "
          "new run with -p or -f");
  if (o.resume.empty()) return;
  require(
      !o.prompt && o.files.empty(),
      fmt::format("{} cannot be combined with --resume, which takes its context from the snapshot; "
                  "--append FILE adds to it",
                  o.prompt ? "-p" : "-f"));
  require(!o.dry_run, "--dry-run cannot be combined with --resume: it plans a new run");
  require(
      o.dump.empty(),
      "--dump cannot be combined with --resume: the snapshot's run has computed the scores of the "
      "context");
}

}  // namespace

void declare_model(CLI::App& app, EngineOptions& o) {
  const auto model = "Model";
  app.add_option("-m,--model", o.model,
                 "Hugging Face folder (config.json, *.safetensors, tokenizer.json) or GGUF file; "
                 "required")
      ->type_name("MODEL")
      ->check(may_change())
      ->group(model);
  app.add_option("--surrogate", o.pruning.surrogate,
                 "KVzap surrogate folder; selects the policy kvzap. Without --surrogate and "
                 "--policy nothing is pruned")
      ->type_name("DIR")
      ->group(model);
  declare_dtype(app, o.dtype, "value type of weights and cache", model);
  declare_kv_type(app, o.kv_type, model);
  declare_read_pages(app, o.read_pages, model);
  declare_weights(app, o.weights, model);
  declare_random_weights(app, o.random_weights,
                         "generate random weights from this seed; with --token-ids, or with -c and "
                         "--dry-run, the folder then needs only config.json",
                         model);
  app.add_option("--layers", o.layers,
                 "use only the first INT layers, for trials: the answers of a truncated model make "
                 "no sense; default: all")
      ->group(model);
  declare_rope(app, o.rope, model);
  declare_threads(app, o.threads, model);
  app.add_option("--placement", o.placement,
                 "assign KV heads to ranks by the kept rows in this report (--json) of an earlier "
                 "run or of kvzap calibrate")
      ->type_name("FILE")
      ->check(not_recorded())
      ->group(model);
  declare_balance(app, o.balance, model);
}

void declare_context(CLI::App& app, EngineOptions& o) {
  const auto prompt = "Prompt";
  declare_thinking(app, o.thinking, prompt);
  app.add_option(
         "-c,--ctx-size", o.max_context,
         "longest sequence accepted, in tokens; default: the model's max_position_embeddings, "
         "extended by RoPE scaling (no limit with --random-weights)")
      ->check(may_change())
      ->group(prompt);
}

void declare_pruning(CLI::App& app, EngineOptions& o) {
  const auto pruning = "Pruning";
  app.add_option("--policy", o.pruning_texts.policy,
                 "policy that scores pairs, NAME[:key=value,...][+MODIFIER[:key=value,...]...]; "
                 "kvzap policies lists names and keys. Set the amount with exactly one of the next "
                 "four options. An @OPTION=value after the policy sets an option of this group")
      ->type_name("POLICY")
      ->group(pruning);
  app.add_option(
         "--threshold", o.pruning_texts.threshold,
         "evict pairs with a score below this, -inf and inf included (kvzap: log score); "
         "auto: the threshold that kvzap calibrate has recommended in the surrogate's folder")
      ->type_name("SCORE")
      ->group(pruning);
  app.add_option("--evict-ratio", o.pruning.amount.evict_ratio,
                 "budget: evicted share of all pairs, in [0, 1). Of kvzap without a modifier: the "
                 "threshold that kvzap calibrate has stored for this ratio. Without a policy: the "
                 "ratio that --dry-run plans with")
      ->group(pruning);
  app.add_option("--keep-tokens", o.pruning.amount.keep_tokens,
                 "budget: rows that each KV head keeps (on average, if heads compete); at least 1")
      ->group(pruning);
  app.add_option(
         "--kv-budget", o.pruning_texts.kv_budget,
         "budget: bytes of keys and values over all layers and ranks, such as 512M, 2GB or 1.5GiB")
      ->type_name("SIZE")
      ->group(pruning);
  app.add_flag("--layerwise", o.pruning.layerwise,
               "apply the budget to each layer, instead of all layers together (kvzip, kvzip-plus "
               "and fastkvzip)")
      ->group(pruning);
  app.add_option("--decode-every", o.pruning.decode.every,
                 "prune the cache again after every INT tokens that follow the context; 0: never")
      ->capture_default_str()
      ->group(pruning);
  app.add_option("--decode-keep", o.pruning.decode.keep,
                 "rows per KV head that stay after --decode-every prunes; at least 1")
      ->group(pruning);
  app.add_option("--decode-evict-ratio", o.pruning.decode.evict_ratio,
                 "evicted share of all tokens so far after --decode-every prunes, in [0, 1)")
      ->group(pruning);
  app.add_option("--prune", o.pruning_texts.prune,
                 "tokens to judge: none, prefill (the context) or always (with a threshold: also "
                 "questions and generated tokens); default: prefill with a policy, none without")
      ->check(CLI::IsMember({"none", "prefill", "always"}))
      ->group(pruning);
  declare_protected(app, o.pruning, pruning);
  app.add_option("--prefill", o.pruning_texts.prefill,
                 "dense: run the context with the full cache, then prune; sparse: run and prune "
                 "chunk by chunk; each chunk attends to the rows that earlier chunks kept")
      ->capture_default_str()
      ->check(CLI::IsMember({"dense", "sparse"}))
      ->group(pruning);
  app.add_option("--chunk", o.pruning.chunk, "tokens of a chunk in sparse prefill; at least 1")
      ->capture_default_str()
      ->group(pruning);
  declare_page_rows(app, o.page_rows, pruning);
}

void declare_console(CLI::App& app, EngineOptions& o) {
  const auto output = "Output";
  declare_progress(app, o.progress, output);
  app.add_flag("-q,--quiet", o.quiet, "print no progress and no report on standard error")
      ->group(output);
  declare_deck(app, o.config, output);
}

void declare_conversation(CLI::App& app, RunOptions& o, const std::vector<std::string>& moments) {
  const auto prompt = "Prompt";
  app.add_option("-p,--prompt", o.prompt, "context; give either -p or -f")
      ->check(not_recorded())
      ->group(prompt);
  add_texts(app, "-f,--file", o.files,
            "file with the context: UTF-8 text, whose line breaks all become LF; - is standard "
            "input, which is also read without -p and -f if it is a pipe. May be repeated")
      ->type_name("FILE")
      ->check(not_recorded())
      ->group(prompt);
  app.add_option("--separator", o.separator,
                 "text between two files of -f, and between the context and a question of a chat "
                 "template, unless white space is there; default: a blank line")
      ->type_name("TEXT")
      ->check(not_recorded())
      ->group(prompt);
  app.add_option("--system", o.system,
                 "system message before the context; replaces that of the chat template")
      ->type_name("TEXT")
      ->check(not_recorded())
      ->group(prompt);
  declare_context(app, o);

  declare_pruning(app, o);
  const auto pruning = "Pruning";
  app.add_option(
         "--prune-after", o.pruning_texts.prune_after,
         "apply a budget after the context, or after context and question together: then "
         "the question decides which rows stay. Until then the cache is full (with finch and "
         "--prefill sparse it has the kept rows and a chunk)")
      ->capture_default_str()
      ->check(CLI::IsMember(moments))
      ->group(pruning);
  app.add_flag("--trim,!--no-trim", o.trim,
               "return unused cache memory to the system, or keep it (default: return it)")
      ->check(may_change())
      ->group(pruning);

  const auto generation = "Generation";
  app.add_option("-n,--n-predict", o.new_tokens,
                 "largest number of tokens to generate per question; -1: until a stop token or the "
                 "end of the context")
      ->capture_default_str()
      ->group(generation);
  app.add_flag("--ignore-eos", o.ignore_eos, "continue after a token that ends the answer")
      ->group(generation);
  declare_answer_form(app, o.form, generation);
  declare_sampling(app, o.sampling, o.sampling_flags, generation);
  declare_lookup(app, o.lookup, generation);
  declare_seed(
      app, [&o](std::optional<std::uint64_t> seed) { o.sampling.seed = seed.value_or(0); }, "0",
      "seed of the sampler, the same for each question", generation);

  const auto output = "Output";
  app.add_option("--json", o.json, "write a report to this file; - is standard output")
      ->type_name("FILE")
      ->group(output);
  app.add_flag("--layer-table", o.layer_table,
               "report the evicted share of every layer; default: of models with more than 8 "
               "layers, only those that evict least and most")
      ->group(output);
  app.add_flag("--json-token-ids", o.json_token_ids,
               "include the token ids of context and questions in that report")
      ->group(output);
  declare_console(app, o);
  CLI::Option* const kv_type = app.get_option("--kv-type");
  kv_type->description(kv_type->get_description() +
                       "; auto: the type that loses least under --kv-budget");
}

void declare_resume(CLI::App& app, RunOptions& o) {
  app.add_option("--resume", o.resume,
                 "continue from this snapshot with its model, context and options, on any number "
                 "of ranks. Options that do not affect its rows can be changed. Unfinished answers "
                 "continue; with --question, the run answers that question instead")
      ->check(file_name)
      ->type_name("FILE")
      ->group("Snapshots");
}

void declare(CLI::App& app, RunOptions& o) {
  declare_model(app, o);
  declare_conversation(app, o, {"context", "question"});
  const auto prompt = "Prompt";
  add_texts(app, "--question", o.questions,
            "question that follows the context. May be repeated: each question is answered from "
            "the same pruned context, and its answer printed below a line \"[1] QUESTION\"")
      ->check(not_recorded())
      ->group(prompt);
  app.add_option("--questions", o.questions_file,
                 "file with one question a line, after those of --question; - is standard input")
      ->check(file_name)
      ->type_name("FILE")
      ->check(not_recorded())
      ->group(prompt);
  app.add_flag("--raw", o.raw, "use no chat template; BOS only if the tokenizer adds one")
      ->check(may_change())
      ->group(prompt);
  app.add_flag("--token-ids", o.token_ids,
               "read context and questions as token ids separated by white space, and print ids; "
               "implies --raw")
      ->check(may_change())
      ->group(prompt);
  declare_snapshots(app, o);
  declare_resume(app, o);
  const auto output = "Output";
  app.add_option("--dump", o.dump,
                 "write token ids, the scores of the context, the evicted pairs and all logits to "
                 "this safetensors file")
      ->type_name("FILE")
      ->group(output);
  app.add_flag(
         "--dry-run", o.dry_run,
         "print the memory that each rank needs for -c tokens and exit; default: the prompt's "
         "tokens plus -n; without a prompt, max_position_embeddings, extended by RoPE scaling")
      ->group(output);
}

void validate(const EngineOptions& o, const PruningUse& use) {
  require(!o.model.empty(), "no model: give a Hugging Face folder or a GGUF file with -m");
  check_page_rows(o.page_rows);
  check_balance(o.balance);
  page_format(o.kv_type, o.dtype);
  read_pages(o.read_pages);
  require(!o.max_context || *o.max_context >= 1,
          fmt::format("-c is {}; expected at least 1; without it: the model's",
                      o.max_context.value_or(0)));
  check(o.pruning, use, flag_names());
}

void validate(const RunOptions& o, bool needs_prompt) {
  check_snapshot_options(o);
  const char* const written = !o.snapshot.empty() ? "--snapshot" : "--dump";
  require(!o.dry_run || (o.snapshot.empty() && o.dump.empty()),
          fmt::format("{} has no effect with --dry-run, which only plans", written));
  EngineOptions engine = o;
  if (o.kv_type == kv_type_auto) {
    require(o.pruning.amount.kv_bytes.has_value(),
            "--kv-type auto chooses a type for --kv-budget: give one, such as --kv-budget 512M");
    // A chat without one has an empty prompt.
    const bool has_prompt = o.prompt && !o.prompt->empty();
    require(needs_prompt || has_prompt || !o.files.empty() || !o.resume.empty(),
            "--kv-type auto chooses a type for a context: give one with -p or -f");
    engine.kv_type.clear();
  }
  validate(engine, pruning_use(o));
  require(o.snapshot.empty() || !o.pruning.has_policy() ||
              !o.pruning.spec().has_modifier(&ModifierInfo::needs_decode_cuts),
          "--snapshot cannot be combined with --policy …+cam: a snapshot has no place for the "
          "attention that cam sums while the model generates");
  require(o.new_tokens >= 0 || o.new_tokens == until_end,
          fmt::format("-n is {}; expected 0 or more, or -1 for no limit", o.new_tokens));
  check_sampling(o.sampling, o.sampling_flags);
  check_answer_form(o.form);
  require(o.form.stops.empty() || !o.token_ids,
          "--stop cannot be combined with --token-ids: the answer has no text");
  check_lookup(o.lookup);
  require(o.lookup == 0 || o.dump.empty(),
          "--lookup cannot be combined with --dump, which has the arrays of each token's own step");
  require(!needs_prompt || !o.prompt || !o.prompt->empty(), "-p: the prompt is empty");
  require(!(o.prompt && !o.files.empty()), "-p and -f both set the prompt: give one of them");
  const char* const without_template = o.raw ? "--raw" : o.token_ids ? "--token-ids" : nullptr;
  require(
      !o.system || !without_template,
      fmt::format("--system cannot be combined with {}: only a chat template has a system message",
                  without_template ? without_template : ""));
  require(
      !o.system || o.resume.empty(),
      "--system cannot be combined with --resume: the snapshot has the beginning of the context");
  require(!o.json_token_ids || !o.json.empty(),
          "--json-token-ids has no effect without --json FILE");
  require(o.dump != "-", "--dump cannot be standard output");
  require(!needs_prompt || o.dry_run || !o.resume.empty() || o.prompt || !o.files.empty(),
          "no prompt: give one with -p TEXT, -f FILE or a pipe into standard input");
}

std::string explain(const CLI::App& app, const CLI::ParseError& error) {
  std::string message = error.what();
  // "--window: is 'wide'; expected a whole number", of make_strict
  const auto is = message.find(": is ");
  if (dynamic_cast<const CLI::ValidationError*>(&error) && is != std::string::npos &&
      message.find(' ') == is + 1) {
    return message.erase(is, 1);
  }
  // "--question: 1 required TEXT missing", "--window: At Most 1 required but received 2", where
  // CLI11 2.6 writes "At most 1"
  const auto colon = message.find(": ");
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&error) && colon != std::string::npos) {
    const std::string flag = message.substr(0, colon);
    if (message.find("missing", colon) != std::string::npos) return flag + " needs a value";
    if (message.find("ost 1 required", colon) != std::string::npos) {
      return flag + " is given more than once";
    }
  }
  // "Could not convert: --window = 99999999999"
  const auto name = message.find("--");
  const auto equals = message.find(" = ", name);
  if (!dynamic_cast<const CLI::ConversionError*>(&error) || equals == std::string::npos) {
    return message;
  }
  const std::string flag = message.substr(name, equals - name);
  const CLI::Option* option = app.get_option_no_throw(flag);
  const bool is_flag = option && option->get_expected_max() == 0;
  return fmt::format("{} is {}; expected {}", flag, message.substr(equals + 3),
                     is_flag ? "no value, true or false" : "a whole number within range");
}

}  // namespace kvzap::driver
