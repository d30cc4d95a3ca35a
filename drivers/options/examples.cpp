#include <map>

#include "options/help.hpp"

namespace kvzap::driver {

const std::vector<std::string>& examples_of(const std::string& command) {
  static const std::map<std::string, std::vector<std::string>> examples = {
      {"run",
       {"kvzap run -m Qwen3-8B -f report.txt --question \"What was decided?\"",
        "kvzap run -m Qwen3-8B --surrogate KVzap-mlp-Qwen3-8B --threshold -4 -f report.txt "
        "--question \"By whom?\" --json run.json",
        "kvzap run -m model.gguf --policy snapkv --evict-ratio 0.5 -f report.txt --dry-run"}},
      {"chat",
       {"kvzap chat -m Qwen3-8B",
        "kvzap chat -m model.gguf -f report.txt --policy expected-attention --evict-ratio 0.5"}},
      {"serve",
       {"kvzap serve -m Qwen3-8B --port 8000",
        "kvzap serve -m Qwen3-8B --surrogate KVzap-mlp-Qwen3-8B --threshold -4 --kv-memory 8GiB "
        "--api-key-file keys.txt"}},
      {"prefix",
       {"kvzap prefix add --prefix-store states -m Qwen3-8B --surrogate KVzap-mlp-Qwen3-8B "
        "--threshold -4 -f report.txt",
        "kvzap prefix list --prefix-store states",
        "kvzap prefix remove --prefix-store states --all"}},
      {"bench",
       {"kvzap bench -m Qwen3-8B -p 512,2048 -n 128",
        "kvzap bench -m Qwen3-8B -d 8192 --evict-ratio 0,0.75 -o csv"}},
      {"collect", {"kvzap collect -m Qwen3-8B -f texts.jsonl -o pairs.h5"}},
      {"train",
       {"kvzap train linear pairs.h5 -o surrogate",
        "kvzap train mlp pairs.h5 -o surrogate --epochs 10 --plot training.svg"}},
      {"calibrate",
       {"kvzap calibrate -m Qwen3-8B --surrogate surrogate -f texts.txt --evict-ratio 0.5,0.75",
        "kvzap calibrate --surrogate surrogate --evaluation results"}},
      {"eval",
       {"kvzap eval -m Qwen3-8B --tasks tasks.jsonl --policies \"none;snapkv;h2o\" -o results",
        "kvzap eval -m Qwen3-8B --tasks tasks.jsonl --policies \"none;kvzap\" --surrogate "
        "surrogate "
        "--thresholds -6,-5,-4 -o results"}},
      {"make-tasks",
       {"kvzap make-tasks ruler -m Qwen3-8B --length 4096 --per-task 20 -o tasks.jsonl",
        "kvzap make-tasks recall -m inputs/models/recall-4m --length 1024 -o tasks.jsonl"}},
      {"leaderboard",
       {"kvzap leaderboard results", "kvzap leaderboard results other-results -o page.html"}},
      {"convert",
       {"kvzap convert -m Qwen3-8B -o Qwen3-8B.gguf", "kvzap convert -m model.gguf -o model"}},
      {"quantize", {"kvzap quantize -m Qwen3-8B --type Q4_K_M -o Qwen3-8B-Q4_K_M.gguf"}},
      {"inspect", {"kvzap inspect cache.h5", "kvzap inspect cache.h5 --verify"}},
      {"diff", {"kvzap diff cache.h5 other-cache.h5"}},
      {"policies", {"kvzap policies", "kvzap policies snapkv"}},
      {"models", {"kvzap models", "kvzap models --json"}},
      {"completion", {"kvzap completion bash > ~/.local/share/bash-completion/completions/kvzap"}},
      {"manual", {"kvzap manual > kvzap.1"}}};
  static const std::vector<std::string> none;
  const auto found = examples.find(command);
  return found == examples.end() ? none : found->second;
}

}  // namespace kvzap::driver
