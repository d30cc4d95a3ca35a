#include <fmt/format.h>

#include "commands/lab/eval.hpp"
#include "options/options.hpp"
#include "options/strict_values.hpp"

namespace kvzap::driver {
namespace {

void declare_tasks(CLI::App& app, EvalOptions& o) {
  const auto tasks = "Tasks";
  add_texts(app, "--tasks", o.tasks,
            "JSONL files of prompts with known answers, between commas; required")
      ->type_name("FILE,...")
      ->group(tasks);
  app.add_option("--prompt-templates", o.prompt_templates,
                 "JSON file of a text with {context} and {input} for each task, for rows with "
                 "LongBench's or AIME's own fields")
      ->type_name("FILE")
      ->group(tasks);
  declare_template(app, o.raw, o.thinking, tasks);
  app.add_option(
         "-c,--ctx-size", o.max_context,
         "longest prompt accepted, in tokens; default: the model's longest context, with RoPE "
         "scaling (no limit with --random-weights)")
      ->group(tasks);
  app.add_option("--max-prompts", o.max_prompts,
                 "use only this number of first prompts; default: all")
      ->group(tasks);
  app.add_option("--per-task", o.per_task,
                 "use only this number of first prompts of each task of a file; default: all")
      ->group(tasks);
  app.add_flag("--keep-going", o.keep_going,
               "leave out invalid lines and prompts that are too long, and count them")
      ->group(tasks);
}

void declare_settings(CLI::App& app, EvalOptions& o) {
  const auto settings = "Settings";
  add_texts(app, "--policies", o.policies,
            "policies of kvzap run --policy, or none, between semicolons; each may have its own "
            "settings, as in snapkv@evict-ratios=0.5,0.75@prune-after=question. Amounts "
            "(evict-ratios, thresholds, keep-tokens, kv-budget) are lists; kv-type is a TYPE of "
            "--kv-type; required")
      ->type_name("POLICY;...")
      ->group(settings);
  add_texts(
      app, "--evict-ratios", o.evict_ratios,
      "evict ratios of all policies, between commas; 0 is the full cache. kvzap: those with a "
      "threshold that kvzap calibrate has stored")
      ->type_name("LIST")
      ->default_str("0,0.25,0.5,0.75,0.9")
      ->group(settings);
  add_texts(app, "--thresholds", o.thresholds,
            "thresholds of kvzap, between commas, instead of its evict ratios; auto: the threshold "
            "that kvzap calibrate has recommended; default: none")
      ->type_name("LIST")
      ->group(settings);
  app.add_option("--prune-after", o.pruning_texts.prune_after,
                 "when to prune to a budget, for policies that can do both: after the context, or "
                 "after context and question")
      ->capture_default_str()
      ->check(CLI::IsMember({"context", "question"}))
      ->group(settings);
  app.add_option(
         "--prune", o.pruning_texts.prune,
         "tokens that thresholds judge: prefill (the context) or always (also questions and "
         "generated tokens, if the policy can)")
      ->default_str("prefill")
      ->check(CLI::IsMember({"prefill", "always"}))
      ->group(settings);
  app.add_option(
         "--prefill", o.pruning_texts.prefill,
         "dense: full attention over the context, then pruning; sparse: chunk by chunk, over "
         "the rows that earlier chunks kept, if the policy can")
      ->capture_default_str()
      ->check(CLI::IsMember({"dense", "sparse"}))
      ->group(settings);
  app.add_option("--chunk", o.pruning.chunk, "tokens of a chunk of sparse prefill; at least 1")
      ->capture_default_str()
      ->group(settings);
  declare_protected(app, o.pruning, settings);
}

void declare_generation(CLI::App& app, EvalOptions& o) {
  const auto generation = "Generation";
  app.add_option("-n,--n-predict", o.new_tokens,
                 "limit of generated tokens per prompt; default: by task")
      ->group(generation);
  app.add_option("--tries", o.tries, "answers sampled for each prompt; more than 1 need --temp")
      ->capture_default_str()
      ->group(generation);
  app.add_option("--pass-k", o.pass_k,
                 "also report pass@k, the probability that one of k tries is right; 0: do not")
      ->capture_default_str()
      ->group(generation);
  app.add_option("--temp", o.sampling.temperature, "sampling temperature; 0 is greedy")
      ->capture_default_str()
      ->group(generation);
  declare_filters(app, o.sampling, generation);
  declare_seed(
      app, [&o](std::optional<std::uint64_t> seed) { o.sampling.seed = seed.value_or(0); }, "0",
      "seed of the sampler's first try (each further try adds 1) and of the bootstrap", generation);
  app.add_option(
         "--parallel", o.parallel,
         "heads: ranks share the model by KV heads; prompts: every rank has the whole model, "
         "and ranks take prompts in turns. The results are the same")
      ->capture_default_str()
      ->check(CLI::IsMember({"heads", "prompts"}))
      ->group(generation);
  app.add_option("--batch", o.batch, "limit of sequences that decode together; 0: all settings")
      ->capture_default_str()
      ->group(generation);
}

void declare_output(CLI::App& app, EvalOptions& o) {
  const auto output = "Output";
  app.add_option(
         "-o,--output", o.output,
         "folder of the results; continues an interrupted run of the same command; required")
      ->type_name("DIR")
      ->group(output);
  app.add_option("--bootstrap-samples", o.bootstrap_samples,
                 "bootstrap samples for 95 % intervals; scores of 0 and 1 have Wilson's intervals")
      ->capture_default_str()
      ->group(output);
  app.add_option("--json", o.json,
                 "also write the summary to this file; - is standard output, instead of the table")
      ->type_name("FILE")
      ->group(output);
}

}  // namespace

void declare(CLI::App& app, EvalOptions& o) {
  declare_model(app, o);
  declare_page_rows(app, o.page_rows, "Model");
  declare_tasks(app, o);
  declare_settings(app, o);
  declare_generation(app, o);
  declare_output(app, o);
  declare_console(app, o);
  const auto describe = [&](const char* name, const char* text) {
    app.get_option(name)->description(text);
  };
  describe("--model", "Hugging Face folder or GGUF file; required");
  describe("--surrogate", "KVzap surrogate folder, for policies kvzap that name none");
  describe("--random-weights",
           "random weights from this seed, for trials; the folder then needs only config.json and "
           "a tokenizer");
  describe("--quiet", "no progress and no notes on standard error");
}

}  // namespace kvzap::driver
