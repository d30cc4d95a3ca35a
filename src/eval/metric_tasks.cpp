#include "eval/metric_tasks.hpp"

#include <algorithm>
#include <array>

#include "files/ascii.hpp"

namespace kvzap::eval {
namespace {

struct NamedTask {
  std::string_view name, metric;
  std::int64_t max_new_tokens;
};

constexpr std::string_view no_word_cutting =
    "LongBench cuts Chinese texts into words by a dictionary that kvzap does not have; name a "
    "metric in the row, such as char_f1, whose figures are not LongBench's";
constexpr std::string_view no_such_metric =
    "its published metric is none of kvzap's; name a metric in the row";

// Sources. RULER: scripts/synthetic.yaml and scripts/{data,eval}/synthetic/constants.py, by the
// name up to the first underscore. LongBench: dataset2metric in eval.py,
// config/dataset2maxlen.json. InfiniteBench: src/compute_scores.py and src/eval_utils.py. LooGLE:
// kvpress' evaluation.
constexpr std::array<NamedTask, 9> ruler_tasks = {
    {{"niah", "string_match_all", 128},
     {"vt", "string_match_all", 30},
     {"cwe", "string_match_all", 120},
     {"fwe", "string_match_all", 50},
     {"qa", "string_match_part", 32},
     {"variable", "string_match_all", 30},  // variable_tracking
     {"common", "string_match_all", 120},   // common_words_extraction
     {"freq", "string_match_all", 50},      // freq_words_extraction
     {"needle", "rouge_l", 0}}};            // needle_in_haystack, as kvpress' evaluation does

constexpr std::array<NamedTask, 43> named_tasks = {
    {{"narrativeqa", "token_f1", 128},
     {"qasper", "token_f1", 128},
     {"multifieldqa_en", "token_f1", 64},
     {"hotpotqa", "token_f1", 32},
     {"2wikimqa", "token_f1", 32},
     {"musique", "token_f1", 32},
     {"gov_report", "rouge_l", 512},
     {"qmsum", "rouge_l", 512},
     {"multi_news", "rouge_l", 512},
     {"trec", "classification", 64},
     {"triviaqa", "token_f1", 32},
     {"samsum", "rouge_l", 128},
     {"lsht", "classification", 64},
     {"passage_count", "count", 32},
     {"passage_retrieval_en", "retrieval", 32},
     {"passage_retrieval_zh", "retrieval_zh", 32},
     {"lcc", "code_similarity", 64},
     {"repobench-p", "code_similarity", 64},
     {"longbench-v2", "stated_choice", 128},
     {"longbenchv2", "stated_choice", 128},
     {"passkey", "first_integer", 6},
     {"number_string", "first_integer", 12},
     {"kv_retrieval", "contains_word", 50},
     {"longbook_qa_eng", "token_f1", 40},
     {"longbook_qa_chn", "char_f1", 40},
     {"longbook_choice_eng", "multiple_choice", 40},
     {"longdialogue_qa_eng", "string_match_part", 40},
     {"shortdep_qa", "rouge_l", 300},
     {"longdep_qa", "rouge_l", 500},
     {"longdep_summarization", "rouge_l", 500},
     {"math500", "boxed_text", 0},
     {"math-500", "boxed_text", 0},
     {"math_500", "boxed_text", 0},
     {"multifieldqa_zh", "", 64},
     {"dureader", "", 128},
     {"vcsum", "", 512},
     {"shortdep_cloze", "", 50},
     {"code_run", "", 5},
     {"code_debug", "", 5},
     {"math_find", "", 3},
     {"math_calc", "", 30000},
     {"longbook_sum_eng", "", 1200},
     {"longbook_sum_chn", "", 1200}}};

}  // namespace

std::string_view longbench_name(std::string_view task) {
  const bool is_e = task.size() > 2 &&
                    (task.substr(task.size() - 2) == "_e" || task.substr(task.size() - 2) == "-e");
  return is_e ? task.substr(0, task.size() - 2) : task;
}

bool judges_first_line(std::string_view task) {
  const std::string lower = files::lower_case(task);
  const std::string_view name = longbench_name(lower);
  return name == "trec" || name == "triviaqa" || name == "samsum" || name == "lsht";
}

TaskDefaults task_defaults(std::string_view task) {
  const std::string lower = files::lower_case(task);
  const std::string_view name = longbench_name(lower);
  const auto find = [](const auto& tasks, std::string_view sought) {
    return std::find_if(tasks.begin(), tasks.end(),
                        [&](const NamedTask& known) { return known.name == sought; });
  };
  if (const auto* known = find(named_tasks, name); known != named_tasks.end()) {
    TaskDefaults defaults{std::string(known->metric), known->max_new_tokens, {}};
    const bool is_chinese = name == "multifieldqa_zh" || name == "dureader" || name == "vcsum";
    if (known->metric.empty()) defaults.missing = is_chinese ? no_word_cutting : no_such_metric;
    return defaults;
  }
  const std::string_view family = name.substr(0, name.find('_'));
  if (const auto* known = find(ruler_tasks, family); known != ruler_tasks.end()) {
    return {std::string(known->metric), known->max_new_tokens, {}};
  }
  if (name.substr(0, 4) == "aime") return {"boxed_integer", 0, {}};
  return {"string_match_all", 0, {}};
}

}  // namespace kvzap::eval
