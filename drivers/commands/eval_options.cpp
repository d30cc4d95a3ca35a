#include <fmt/format.h>

#include "commands/eval.hpp"
#include "options/options.hpp"
#include "options/strict_values.hpp"

namespace kvzap::driver {

void declare(CLI::App& app, EvalOptions& o) {
  // One part per flag, so that what follows is not taken for another; a flag may be repeated.
  const auto add_list = [&](const std::string& name, std::vector<std::string>& parts,
                            const char* type, const std::string& description) {
    return add_texts(app, name, parts, description)->type_name(type);
  };

  const auto model = "Model";
  app.add_option("-m,--model", o.model, "Hugging Face folder; required")
      ->type_name("DIR")
      ->group(model);
  app.add_option("--surrogate", o.surrogate,
                 "KVzap surrogate folder, for policies kvzap that name none of their own")
      ->type_name("DIR")
      ->group(model);
  declare_dtype(app, o.dtype, "value type of weights and cache", model);
  declare_random_weights(app, o.random_weights,
                         "make the model's weights up from this seed, for trials; the folder then "
                         "needs config.json and a tokenizer",
                         model);
  declare_rope(app, o.rope, model);
  declare_threads(app, o.threads, model);
  app.add_option("--placement", o.placement,
                 "deal KV heads to ranks by the kept rows in this --json file of kvzap run")
      ->type_name("FILE")
      ->group(model);

  const auto tasks = "Tasks";
  add_list("--tasks", o.tasks, "FILE,...",
           "JSONL files of prompts with known answers, between commas; required")
      ->group(tasks);
  app.add_option("--prompt-templates", o.prompt_templates,
                 "JSON file of texts with {context} and {input} by task, for rows with LongBench's "
                 "or AIME's own fields")
      ->type_name("FILE")
      ->group(tasks);
  declare_template(app, o.raw, o.thinking, tasks);
  app.add_option("-c,--ctx-size", o.max_context,
                 "longest prompt accepted, in tokens; default: the model's "
                 "max_position_embeddings, or what RoPE scaling makes of it (no limit with "
                 "--random-weights)")
      ->group(tasks);
  app.add_option("--max-prompts", o.max_prompts, "only so many of the first prompts; default: all")
      ->group(tasks);
  app.add_option("--per-task", o.per_task,
                 "only so many of the first prompts of each task of a file; default: all")
      ->group(tasks);
  app.add_flag("--keep-going", o.keep_going,
               "leave out lines that are no prompt and prompts that are too long, and count them")
      ->group(tasks);

  const auto settings = "Settings";
  add_list("--policies", o.policies, "POLICY;...",
           "policies as kvzap run --policy has them, and none, between semicolons; behind each may "
           "stand settings of its own, as in snapkv@evict-ratios=0.5,0.75@prune-after=question "
           "(evict-ratios, thresholds, keep-tokens, kv-budget, prune-after, prune, prefill); "
           "required")
      ->group(settings);
  add_list("--evict-ratios", o.evict_ratios, "LIST",
           "evict ratios of policies that take a budget, between commas; 0 is the full cache")
      ->default_str("0,0.25,0.5,0.75,0.9")
      ->group(settings);
  add_list("--thresholds", o.thresholds, "LIST",
           "thresholds of kvzap, between commas, beside its evict ratios; default: none")
      ->group(settings);
  app.add_option("--prune-after", o.prune_after,
                 "when a budget is met, where a policy can do both: after the context, or after "
                 "context and question together")
      ->capture_default_str()
      ->check(CLI::IsMember({"context", "question"}))
      ->group(settings);
  app.add_option("--prune", o.prune,
                 "what thresholds judge: prefill (the context) or always (questions and generated "
                 "tokens too, where the policy can)")
      ->capture_default_str()
      ->check(CLI::IsMember({"prefill", "always"}))
      ->group(settings);
  app.add_option("--prefill", o.prefill,
                 "dense: the context attends to all of itself, then is pruned; sparse: chunk by "
                 "chunk, over what earlier chunks left, where the policy can")
      ->capture_default_str()
      ->check(CLI::IsMember({"dense", "sparse"}))
      ->group(settings);
  app.add_option("--chunk", o.chunk, "tokens of a chunk in sparse prefill; at least 1")
      ->capture_default_str()
      ->group(settings);
  declare_protected(app, o.window, o.sink, settings);

  const auto generation = "Generation";
  app.add_option("-n,--n-predict", o.new_tokens,
                 "most tokens to generate per prompt; default: as the tasks say")
      ->group(generation);
  app.add_option("--tries", o.tries, "answers drawn for each prompt; more than 1 need --temp")
      ->capture_default_str()
      ->group(generation);
  app.add_option("--pass-k", o.pass_k,
                 "also tell the probability that one of so many tries is right; 0: do not")
      ->capture_default_str()
      ->group(generation);
  app.add_option("--temp,--temperature", o.sampling.temperature,
                 "sampling temperature; 0 is greedy")
      ->capture_default_str()
      ->group(generation);
  declare_filters(app, o.sampling, generation);
  app.add_option(
         "--seed", o.sampling.seed,
         "seed of the sampler's first try (the next has the next seed) and of the bootstrap")
      ->capture_default_str()
      ->check(not_negative)
      ->group(generation);
  app.add_option("--parallel", o.parallel,
                 "heads: ranks share the model by its KV heads; prompts: every rank has the whole "
                 "model, and ranks take prompts in turns. The results are the same")
      ->capture_default_str()
      ->check(CLI::IsMember({"heads", "prompts"}))
      ->group(generation);
  app.add_option("--batch", o.batch, "sequences that decode together at most; 0: all settings'")
      ->capture_default_str()
      ->group(generation);

  const auto output = "Output";
  app.add_option("-o,--output", o.output,
                 "folder of the results; where the same command has been interrupted it goes on; "
                 "required")
      ->type_name("DIR")
      ->group(output);
  app.add_option("--bootstrap-samples", o.bootstrap_samples,
                 "samples from which the 95 % intervals of accuracies are taken")
      ->capture_default_str()
      ->group(output);
  app.add_option("--json", o.json,
                 "write the summary to this file too; - is standard output, instead of the table")
      ->type_name("FILE")
      ->group(output);
  declare_progress(app, o.progress, output);
  app.add_flag("-q,--quiet", o.quiet, "no progress and no notes on standard error")->group(output);
  declare_deck(app, o.config, output);
}

}  // namespace kvzap::driver
