#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <kvzap/core/types.hpp>
#include <kvzap/lab/metrics.hpp>
#include <kvzap/lab/tasks.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "eval/metric_tasks.hpp"
#include "files/json_field.hpp"
#include "files/json_file.hpp"
#include "files/line_reader.hpp"
#include "files/nearest.hpp"

namespace kvzap {
namespace {

using Json = nlohmann::json;
using files::JsonField;

constexpr std::int64_t max_new_tokens_limit = 1 << 20;

// A naming scheme of fields. The field of the question identifies the scheme.
struct TaskScheme {
  const char* name;
  std::vector<const char*> questions;  // the first present one
  std::vector<const char*> answers;
  bool needs_context;
  std::vector<const char*> foreign;  // fields of other schemes with the same meaning
};

const std::array<TaskScheme, 4>& task_schemes() {
  static const std::array<TaskScheme, 4> schemes = {{
      {"kvpress (context, question, answer)",
       {"question"},
       {"answer", "answers"},
       false,
       {"outputs", "input", "problem", "Problem"}},
      {"RULER (input, outputs)",
       {},
       {"outputs"},
       true,
       {"context", "question", "answer", "answers", "problem", "Problem"}},
      {"LongBench (input, context, answers)",
       {"input"},
       {"answers"},
       true,
       {"question", "answer", "problem", "Problem"}},
      {"AIME (problem, answer)",
       {"problem", "Problem"},
       {"answer", "Answer"},
       false,
       {"context", "question", "answers"}},
  }};
  return schemes;
}

enum TaskSchemeIndex { kvpress_rows, ruler_rows, longbench_rows, aime_rows };

// Returns whether the row has the field. Null counts as absent, because tables with gaps write it.
bool row_has(const Json& row, const char* field) {
  const auto found = row.find(field);
  return found != row.end() && !found->is_null();
}

std::string row_field_list(const std::vector<const char*>& fields) {
  std::string list;
  for (const char* field : fields) list += (list.empty() ? "" : " or ") + std::string(field);
  return list;
}

// Returns the one of `fields` that is present, or "". Throws if two are present.
const char* only_row_field(const Json& row, const std::vector<const char*>& fields,
                           const std::string& where) {
  const char* only = "";
  for (const char* field : fields) {
    if (!row_has(row, field)) continue;
    if (*only != '\0') {
      throw Error(fmt::format("{}: expected one of {}, found both {} and {}", where,
                              row_field_list(fields), only, field));
    }
    only = field;
  }
  return only;
}

TaskSchemeIndex scheme_of(const Json& row) {
  if (row_has(row, "outputs")) return ruler_rows;
  if (row_has(row, "problem") || row_has(row, "Problem")) return aime_rows;
  return row_has(row, "input") ? longbench_rows : kvpress_rows;
}

std::string row_text(const Json& row, const char* field, const std::string& where) {
  return row_has(row, field) ? JsonField(row.at(field), where, field).string() : std::string();
}

// Returns a string, or a number as text.
std::string text_of_answer(const JsonField& field) {
  const Json& value = field.value();
  if (value.is_number()) return value.dump();
  if (!value.is_string()) field.fail("a string or a number");
  return value.get<std::string>();
}

std::vector<std::string> row_answers_of(const JsonField& field) {
  std::vector<std::string> answers;
  if (field.value().is_array()) {
    for (std::size_t i = 0; i < field.array_size(); ++i) {
      answers.push_back(text_of_answer(field.element(i)));
    }
    if (answers.empty()) field.fail("at least one answer");
  } else if (field.value().is_string() || field.value().is_number()) {
    answers.push_back(text_of_answer(field));
  } else {
    field.fail("a string, a number or an array of them");
  }
  return answers;
}

std::int64_t max_new_tokens_of(const JsonField& field) {
  const Json& value = field.value();
  // Tables with gaps store whole numbers as floating point.
  const double number = value.is_number() ? value.get<double>() : 0;
  if (!(number >= 1) || !(number <= static_cast<double>(max_new_tokens_limit)) ||
      number != std::floor(number)) {
    field.fail(fmt::format("a whole number from 1 to {}", max_new_tokens_limit));
  }
  return static_cast<std::int64_t>(number);
}

// Returns the row's id, a text or a number.
std::string task_id_of(const Json& row, const std::string& where) {
  for (const char* name : {"id", "_id", "ID", "index"}) {
    if (!row_has(row, name)) continue;
    const JsonField field(row.at(name), where, name);
    if (field.value().is_number_integer()) return field.value().dump();
    if (!field.value().is_string()) field.fail("a string or a whole number");
    return field.string();
  }
  return {};
}

// RULER keeps a task's prompts in NAME/validation.jsonl.
std::string task_name_of(const std::filesystem::path& file) {
  const std::string stem = file.stem().string();
  const std::string folder = std::filesystem::absolute(file).parent_path().filename().string();
  const bool is_split = stem == "validation" || stem == "test" || stem == "train";
  return is_split && !folder.empty() ? folder : stem;
}

// Replaces each `placeholder` by `replacement`.
std::string template_filled_in(std::string_view text, std::string_view placeholder,
                               std::string_view replacement) {
  std::string filled;
  for (std::size_t at = text.find(placeholder); at != std::string_view::npos;
       at = text.find(placeholder)) {
    filled.append(text.substr(0, at)).append(replacement);
    text.remove_prefix(at + placeholder.size());
  }
  return filled.append(text);
}

constexpr std::string_view context_placeholder = "{context}";
constexpr std::string_view input_placeholder = "{input}";

void put_row_together(Task& task, const PromptTemplates& templates, const std::string& where) {
  auto found = templates.find(task.task);
  if (found == templates.end()) {
    found = templates.find(std::string(eval::longbench_name(task.task)));
  }
  if (found == templates.end()) {
    std::vector<std::string> names;
    for (const auto& [name, text] : templates) names.push_back(name);
    const std::string nearest = files::nearest_name(task.task, names);
    throw Error(fmt::format("{}: task: expected one that the prompt templates name, found {}{}",
                            where, task.task,
                            nearest.empty() ? "" : fmt::format("; did you mean {}?", nearest)));
  }
  std::string_view rest = found->second;
  if (const std::size_t at = rest.find(context_placeholder); at != std::string_view::npos) {
    task.context =
        template_filled_in(rest.substr(0, at), input_placeholder, task.question) + task.context;
    rest.remove_prefix(at + context_placeholder.size());
  }
  task.question = template_filled_in(rest, input_placeholder, task.question);
}

// LongBench-v2 has the choices beside the question. Converted rows may have them in the question as
// well.
void add_row_choices(Task& task, const Json& row, const std::string& where) {
  constexpr std::array<const char*, 4> fields = {"choice_A", "choice_B", "choice_C", "choice_D"};
  if (!row_has(row, fields[0])) return;
  std::string choices = "\nChoices:";
  for (const char* field : fields) {
    if (!row_has(row, field)) {
      throw Error(fmt::format("{}: {}: expected a string, found no such field", where, field));
    }
    choices += fmt::format("\n({}) {}", field[7], row_text(row, field, where));
  }
  if (task.metric.empty()) task.metric = "stated_choice";
  if (task.question.find(choices) != std::string::npos) return;
  task.question += choices;
  task.question +=
      "\n\nFormat your response as follows: \"The correct answer is (insert answer here)\".";
}

Task task_of(const Json& row, const std::string& where, const std::string& default_name,
             const PromptTemplates& templates) {
  const TaskSchemeIndex index = scheme_of(row);
  const TaskScheme& scheme = task_schemes()[index];
  for (const char* field : scheme.foreign) {
    if (row_has(row, field)) {
      throw Error(fmt::format("{}: {}: expected the fields of {}, found a field of another scheme",
                              where, field, scheme.name));
    }
  }
  const auto require = [&](const char* field) {
    if (row_has(row, field)) return;
    throw Error(
        fmt::format("{}: {}: expected a string, found no such field; a row has the fields "
                    "of {}",
                    where, field, scheme.name));
  };
  Task task;
  const char* const context = index == ruler_rows ? "input" : "context";
  const char* const question = only_row_field(row, scheme.questions, where);
  const char* const answer = only_row_field(row, scheme.answers, where);
  // Data sets have null fields, but the parts of a prompt must not be null.
  for (const char* field : {context, question}) {
    if (row.contains(field) && row.at(field).is_null()) {
      throw Error(fmt::format("{}: {}: expected a string, found null", where, field));
    }
  }
  if (scheme.needs_context) require(context);
  if (index == kvpress_rows) require("question");
  task.context = row_text(row, context, where);
  if (*question != '\0') task.question = row_text(row, question, where);
  if (task.context.empty() && task.question.empty()) {
    throw Error(fmt::format("{}: {}: expected a prompt, found none", where, context));
  }
  if (*answer == '\0') {
    throw Error(fmt::format("{}: {}: expected the answer, found no such field", where,
                            row_field_list(scheme.answers)));
  }
  task.answers = row_answers_of({row.at(answer), where, answer});
  task.answer_prefix = row_text(row, "answer_prefix", where);
  task.task = row_text(row, "task", where);
  if (task.task.empty()) task.task = row_text(row, "dataset", where);
  if (task.task.empty()) task.task = default_name;
  const bool has_parts = index == longbench_rows || index == aime_rows;
  if (has_parts && !templates.empty()) put_row_together(task, templates, where);
  task.metric = row_text(row, "metric", where);
  if (task.metric.empty() && index == aime_rows) task.metric = "boxed_integer";
  if (index == kvpress_rows) add_row_choices(task, row, where);
  for (const char* name : {"all_classes", "classes"}) {
    if (!row_has(row, name) || !task.classes.empty()) continue;
    const JsonField field(row.at(name), where, name);
    for (std::size_t i = 0; i < field.array_size(); ++i) {
      task.classes.push_back(field.element(i).string());
    }
  }
  task.id = task_id_of(row, where);
  if (row_has(row, "max_new_tokens")) {
    task.max_new_tokens = max_new_tokens_of({row.at("max_new_tokens"), where, "max_new_tokens"});
  }
  return task;
}

Task task_of_line(std::string_view line, const std::string& where, const std::string& default_name,
                  const PromptTemplates& templates) {
  const Json row = files::parse_json_object(line, where);
  Task task = task_of(row, where, default_name, templates);
  try {
    const std::int64_t default_tokens = default_max_new_tokens(task);
    if (task.max_new_tokens == 0) task.max_new_tokens = default_tokens;
  } catch (const Error& error) {
    throw Error(fmt::format("{}: {}", where, error.what()));
  }
  return task;
}

}  // namespace

PromptTemplates read_prompt_templates(const std::filesystem::path& file) {
  const Json json = files::read_json_object(file);
  PromptTemplates templates;
  for (const auto& [name, value] : json.items()) {
    const JsonField field(value, file.string(), name);
    const std::string& text = field.string();
    if (text.find(context_placeholder) == std::string::npos &&
        text.find(input_placeholder) == std::string::npos) {
      field.fail("a text with {context} or {input}");
    }
    if (const std::size_t first = text.find(context_placeholder);
        first != std::string::npos &&
        text.find(context_placeholder, first + 1) != std::string::npos) {
      field.fail("a text with {context} once");
    }
    templates[name] = text;
  }
  if (templates.empty()) {
    throw Error(fmt::format("{}: expected a text for each task, found none", file.string()));
  }
  return templates;
}

TaskFile read_tasks(const std::filesystem::path& file, bool keep_going,
                    const PromptTemplates& templates) {
  files::LineReader reader(file, "a file with a JSON object in each line");
  TaskFile result;
  result.file = file;
  const std::string default_name = task_name_of(file);
  while (reader.next_text()) {
    try {
      reader.require_text();
      Task task = task_of_line(reader.line(), reader.where(), default_name, templates);
      task.line = reader.number();
      result.tasks.push_back(std::move(task));
    } catch (const Error& error) {
      if (!keep_going) throw;
      result.skipped.emplace_back(error.what());
    }
  }
  result.hash = reader.hash();
  if (result.tasks.empty()) {
    throw Error(fmt::format("{}: expected a task in each line, found {}", file.string(),
                            result.skipped.empty()
                                ? "no line with any"
                                : "none that can be used; the first: " + result.skipped.front()));
  }
  return result;
}

std::string to_json_line(const Task& task) {
  nlohmann::ordered_json row = {
      {"task", task.task}, {"context", task.context}, {"question", task.question}};
  if (!task.answer_prefix.empty()) row["answer_prefix"] = task.answer_prefix;
  if (task.answers.size() == 1) {
    row["answer"] = task.answers.front();
  } else {
    row["answer"] = task.answers;
  }
  if (task.max_new_tokens > 0) row["max_new_tokens"] = task.max_new_tokens;
  if (!task.metric.empty()) row["metric"] = task.metric;
  if (!task.classes.empty()) row["all_classes"] = task.classes;
  if (!task.id.empty()) row["id"] = task.id;
  return files::json_text(row);
}

}  // namespace kvzap
