#include "commands/lab/make_tasks.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <kvzap/model/chat_template.hpp>
#include <kvzap/model/tokenizer.hpp>
#include <map>
#include <optional>

#include "base/stopwatch.hpp"
#include "commands/run/prompt.hpp"
#include "commands/support/setup.hpp"
#include "console/console.hpp"
#include "console/progress.hpp"
#include "console/signals.hpp"
#include "eval/long_answers.hpp"
#include "eval/made_task.hpp"
#include "eval/recall.hpp"
#include "eval/ruler.hpp"
#include "files/counted.hpp"
#include "files/nearest.hpp"
#include "files/temporary_file.hpp"
#include "options/bench_options.hpp"
#include "options/options.hpp"
#include "options/strict_values.hpp"

namespace kvzap::driver {
namespace {

namespace fs = std::filesystem;
using base::Clock;
using base::seconds_since;
using eval::MadeTask;

/// Returns the requested lengths, ascending and without duplicates.
std::vector<std::int64_t> asked_lengths(const MakeTasksOptions& o) {
  constexpr double longest = 1 << 22;
  std::vector<std::int64_t> lengths;
  for (const double length :
       real_numbers(o.lengths, "--length", "",
                    fmt::format("a whole number of tokens from 1 to {}", longest).c_str(),
                    [](double n) { return n >= 1 && n <= longest && n == std::floor(n); })) {
    lengths.push_back(static_cast<std::int64_t>(length));
  }
  std::sort(lengths.begin(), lengths.end());
  lengths.erase(std::unique(lengths.begin(), lengths.end()), lengths.end());
  return lengths;
}

const std::vector<std::string>& known_tasks(const MakeTasksOptions& o) {
  return o.kind == "ruler"    ? eval::ruler_task_names()
         : o.kind == "recall" ? eval::recall_task_names()
                              : eval::long_answer_task_names();
}

/// Returns the requested tasks in the order of the file, without duplicates; empty if the user has
/// named none.
std::vector<std::string> asked_tasks(const MakeTasksOptions& o) {
  std::vector<std::string> asked;
  for (const std::string& part : o.tasks) {
    for (std::size_t begin = 0; begin <= part.size();) {
      const std::size_t end = std::min(part.find(',', begin), part.size());
      asked.push_back(part.substr(begin, end - begin));
      begin = end + 1;
    }
  }
  const std::vector<std::string>& known = known_tasks(o);
  for (const std::string& name : asked) {
    if (std::find(known.begin(), known.end(), name) != known.end()) continue;
    const std::string nearest = files::nearest_name(name, known);
    throw Error(
        fmt::format("--tasks: '{}' is no task of {}; {} {}", name, o.kind,
                    nearest.empty() ? "expected some of" : "did you mean",
                    nearest.empty() ? fmt::format("{}", fmt::join(known, ", ")) : nearest + "?"));
  }
  std::vector<std::string> ordered;
  for (const std::string& name : known) {
    if (std::find(asked.begin(), asked.end(), name) != asked.end()) ordered.push_back(name);
  }
  return ordered;
}

void check_output(const MakeTasksOptions& o) {
  if (o.output == "-") return;
  require(!fs::is_directory(o.output),
          fmt::format("-o {}: is a folder; expected a file", o.output));
}

/// Writes rows to a file that appears when the last row is written, or to standard output when all
/// rows are made.
class TaskWriter {
 public:
  explicit TaskWriter(const MakeTasksOptions& o) : m_name(o.output), m_self(Communicator::self()) {
    if (m_name == "-") return;
    m_temporary.emplace(m_name, m_self, files::DurableCalls::of_system(), "-o");
    m_temporary->create();
    for (const auto& note : m_temporary->remove_leftovers()) {
      if (!o.quiet) say("kvzap: warning: {}\n", note);
    }
    m_stream.open(m_temporary->path(), std::ios::binary);
    check();
  }

  void add(const std::string& line) {
    if (m_temporary) {
      m_stream << line << '\n';
      check();
    } else {
      m_text += line + '\n';
    }
  }

  void finish() {
    if (m_temporary) {
      m_stream.close();
      check();
      m_temporary->move_to_target();
    } else {
      std::fwrite(m_text.data(), 1, m_text.size(), stdout);
      flush_stdout();
    }
  }

 private:
  void check() const {
    if (m_stream) return;
    throw Error(fmt::format("-o {}: writing failed (is the disk full?)", m_name));
  }

  std::string m_name;
  Communicator m_self;
  std::optional<files::TemporaryFile> m_temporary;
  std::ofstream m_stream;
  std::string m_text;
};

/// A source of rows: its tasks, and the function that makes a row of a task.
struct TaskMaker {
  std::vector<std::string> tasks;
  std::function<MadeTask(const std::string& task, std::int64_t length, std::int64_t index)> make;
  /// Returns how many rows of a task differ in more than their surrounding text.
  std::function<std::int64_t(const std::string& task, std::int64_t length)> different_rows;
};

/// A source whose rows need nothing else. `make`: eval::make_recall or its like.
template <class Make>
TaskMaker plain_maker(const MakeTasksOptions& o, const eval::PromptMeter& meter, const Make& make) {
  TaskMaker maker;
  maker.tasks = asked_tasks(o);
  if (maker.tasks.empty()) maker.tasks = known_tasks(o);
  maker.make = [&meter, make, seed = o.seed](const std::string& task, std::int64_t length,
                                             std::int64_t index) {
    return make(meter, seed, task, length, index);
  };
  return maker;
}

TaskMaker ruler_maker(const MakeTasksOptions& o, const eval::PromptMeter& meter) {
  std::vector<eval::QuestionFile> questions;
  for (const std::string& file : o.questions) questions.push_back(eval::read_questions(file));
  auto ruler = std::make_shared<eval::Ruler>(
      meter, o.haystack.empty() ? eval::Prose::built_in() : eval::Prose::of_file(o.haystack),
      std::move(questions), o.seed);
  TaskMaker maker;
  const std::vector<std::string> asked = asked_tasks(o);
  std::vector<std::string> left_out;
  for (const std::string& task : asked.empty() ? eval::ruler_task_names() : asked) {
    if (ruler->can_make(task)) {
      maker.tasks.push_back(task);
      continue;
    }
    const std::string needs =
        task == "qa_1" ? "a file of questions with --qa" : "a second file of questions with --qa";
    require(asked.empty(), fmt::format("--tasks: {} needs {}", task, needs));
    left_out.push_back(fmt::format("{} (needs {})", task, needs));
  }
  if (!left_out.empty() && !o.quiet) {
    say("kvzap: warning: left out: {}\n", fmt::join(left_out, ", "));
  }
  maker.make = [ruler](const std::string& task, std::int64_t length, std::int64_t index) {
    return ruler->make(task, length, index);
  };
  maker.different_rows = [ruler](const std::string& task, std::int64_t length) {
    return ruler->different_rows(task, length);
  };
  return maker;
}

void warn_of_repeated(const MakeTasksOptions& o, const TaskMaker& maker, const std::string& task,
                      std::int64_t length) {
  if (o.quiet || !maker.different_rows) return;
  const std::int64_t different = maker.different_rows(task, length);
  if (different >= o.per_task) return;
  say("kvzap: warning: {} at {}: {} with {} in all, as there are no more that fit\n", task,
      files::counted(length, "token"), files::counted(o.per_task, "prompt"),
      files::counted(different, "question"));
}

void make_file(const MakeTasksOptions& o) {
  const auto start = Clock::now();
  const auto tokenizer = Tokenizer::load(o.model);
  const eval::PromptMeter meter(tokenizer, prompt_form(o.model, o.raw).parts);
  const TaskMaker maker = o.kind == "ruler"    ? ruler_maker(o, meter)
                          : o.kind == "recall" ? plain_maker(o, meter, eval::make_recall)
                                               : plain_maker(o, meter, eval::make_long_answer);
  TaskWriter writer(o);

  const std::vector<std::int64_t> lengths = asked_lengths(o);
  const auto rows = static_cast<std::int64_t>(lengths.size() * maker.tasks.size()) * o.per_task;
  Progress progress(!o.quiet, o.progress);
  std::int64_t done = 0, all_short = 0, most_short = 0;
  std::string shortest;
  for (const std::int64_t length : lengths) {
    for (const std::string& task : maker.tasks) {
      for (std::int64_t index = 0; index < o.per_task; ++index) {
        stop_here_if_asked();
        progress.update("prompts", done++, rows, "prompts");
        MadeTask made = maker.make(task, length, index);
        // Scores are averaged by task, so each length is a task of its own.
        if (lengths.size() > 1) made.task.task += fmt::format("/{}", length);
        const std::int64_t too_short = length - made.tokens - made.task.max_new_tokens;
        all_short += too_short;
        if (too_short > most_short) {
          most_short = too_short;
          shortest = fmt::format(" ({})", made.task.id);
        }
        writer.add(eval::to_json_line(made));
      }
      progress.clear();
      warn_of_repeated(o, maker, task, length);
    }
  }
  writer.finish();
  progress.clear();
  if (o.quiet) return;
  say("{} in {:.1f} s, shorter than asked by {:.1f} tokens on average and by {} at "
      "most{}\n",
      files::counted(rows, "prompt"), seconds_since(start),
      static_cast<double>(all_short) / static_cast<double>(rows), most_short, shortest);
}

}  // namespace

void check_options(const MakeTasksOptions& o) {
  require(o.kind == "ruler" || o.kind == "recall" || o.kind == "long",
          o.kind.empty()
              ? std::string("no kind of tasks: give ruler, recall or long first")
              : fmt::format("'{}' is no kind of tasks; expected ruler, recall or long", o.kind));
  require(!o.model.empty(),
          "no model: give a Hugging Face folder or a GGUF file with -m, for its tokenizer");
  require(!o.lengths.empty(), "no length: give tokens with --length");
  require(!o.output.empty(), "no output: give a file with -o; - is standard output");
  asked_lengths(o);
  asked_tasks(o);
  constexpr std::int64_t most = 1'000'000;
  require(o.per_task >= 1 && o.per_task <= most,
          fmt::format("--per-task is {}; expected 1 to {}", o.per_task, most));
  if (o.kind != "ruler") {
    require(o.haystack.empty(),
            fmt::format("--haystack is for ruler: {} has sentences of its own", o.kind));
    require(o.questions.empty(), fmt::format("--qa is for ruler: {} has no such task", o.kind));
  }
  constexpr std::size_t most_questions = 2;
  require(o.questions.size() <= most_questions,
          fmt::format("--qa is given {} times; expected one file for qa_1 and one for qa_2",
                      o.questions.size()));
  check_output(o);
}

void declare(CLI::App& app, MakeTasksOptions& o) {
  const auto list = [&](const std::string& name, std::vector<std::string>& parts,
                        const std::string& help) {
    return add_texts(app, name, parts, help)->type_name("LIST");
  };
  const auto tasks = "Tasks";
  app.add_option("kind,--kind", o.kind,
                 "ruler (the 13 tasks of RULER, arXiv 2404.06654), recall (tasks of the demo "
                 "model, for small models) or long (copies, lookups and sums with long answers)")
      ->group(tasks);
  list("--length", o.lengths,
       "length of each prompt in tokens, with the answer, between commas: the longest prompt of "
       "whole parts that does not exceed it. Required")
      ->group(tasks);
  list("--tasks", o.tasks, "make only the tasks of these names, between commas; default: all")
      ->group(tasks);
  app.add_option("--per-task", o.per_task, "prompts per task and length")
      ->capture_default_str()
      ->group(tasks);
  app.add_option("--seed", o.seed, "seed of all draws; the same seed gives the same prompts")
      ->check(not_negative)
      ->capture_default_str()
      ->group(tasks);
  app.add_option(
         "--haystack", o.haystack,
         "ruler: text in which niah_single_2, niah_single_3, niah_multikey_1, niah_multivalue "
         "and niah_multiquery hide their needles; default: prose of random words. Each row "
         "names it in the field haystack")
      ->type_name("FILE")
      ->group(tasks);
  add_texts(
      app, "--qa", o.questions,
      "ruler: file of questions for qa_1, in SQuAD's or HotpotQA's JSON; given again, for qa_2. "
      "Tasks without a file are left out")
      ->type_name("FILE")
      ->group(tasks);

  const auto model = "Model";
  app.add_option(
         "-m,--model", o.model,
         "Hugging Face folder or GGUF file with the tokenizer and the chat template that count the "
         "tokens; required")
      ->type_name("MODEL")
      ->group(model);
  app.add_flag("--raw", o.raw, "no chat template; BOS only if the tokenizer adds one")
      ->group(model);

  const auto output = "Output";
  app.add_option(
         "-o,--output", o.output,
         "JSONL file for kvzap eval --tasks, written only if complete; - is standard output. "
         "Required")
      ->type_name("FILE")
      ->group(output);
  declare_progress(app, o.progress, output);
  app.add_flag("-q,--quiet", o.quiet, "no progress on standard error")->group(output);
  declare_deck(app, o.config, output);
}

int make_tasks(const MakeTasksOptions& options, const Communicator& comm) {
  return write_unless_stopped(options.output == "-" ? "standard output" : options.output, comm,
                              [&] { make_file(options); });
}

}  // namespace kvzap::driver
