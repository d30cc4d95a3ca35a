// Wrong command lines of every command: one line, exit status 2, and what to type instead.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "options/foreign_flags.hpp"
#include "options/help.hpp"
#include "options/option_names.hpp"
#include "unit/driver/command_lines.hpp"
#include "unit/temporary_folder.hpp"

namespace kvzap::test {
namespace {

using Texts = std::vector<std::string>;

/// Splits a command line as a shell does: '...', "..." and $'...' with its escapes.
Texts shell_split(const std::string& line) {
  Texts words;
  std::string word;
  bool has_word = false;
  for (std::size_t i = 0; i < line.size(); ++i) {
    const bool is_ansi = line.compare(i, 2, "$'") == 0;
    if (line[i] == ' ') {
      if (has_word) words.push_back(word);
      word.clear();
      has_word = false;
    } else if (line[i] == '\'' || line[i] == '"' || is_ansi) {
      has_word = true;
      const char quote = is_ansi ? '\'' : line[i];
      for (i += is_ansi ? 2 : 1; i < line.size() && line[i] != quote; ++i) {
        if (is_ansi && line[i] == '\\') {
          const char escape = line[++i];
          word += escape == 'n' ? '\n' : escape == 't' ? '\t' : escape;
        } else {
          word += line[i];
        }
      }
    } else if (line[i] == '\\') {
      has_word = true;
      word += line[++i];
    } else {
      has_word = true;
      word += line[i];
    }
  }
  if (has_word) words.push_back(word);
  return words;
}

/// Reads the arguments alone, without the checks of values that need files.
driver::Reading parse(const Texts& arguments) {
  driver::CommandLine line;
  return driver::read_arguments(line, arguments);
}

Texts joined(Texts all, const Texts& more) {
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

TEST(WrongLines, EveryCommandExitsWithTwoAndOneLine) {
  const TemporaryFolder folder;
  folder.write("tasks.jsonl", "");
  const std::string tasks = folder.path() / "tasks.jsonl";
  const Texts run = {"run", "-m", model_folder, "-p", "one"};
  const Texts chat = {"chat", "-m", model_folder};
  const Texts serve = {"serve", "-m", model_folder};
  const Texts bench = {"bench", "-m", model_folder};
  const Texts collect = {"collect", "-m", model_folder, "-f", tasks, "-o", "x.h5"};
  const Texts train = {"train", "linear", "x.h5", "-o", "x"};
  const Texts calibrate = {"calibrate",      "-m", model_folder, "--surrogate",
                           surrogate_folder, "-f", tasks};
  const Texts eval = {"eval",       "-m",   model_folder, "--tasks", tasks,
                      "--policies", "none", "-o",         "x"};
  const Texts make = {"make-tasks", "recall", "-m", model_folder, "--length", "100", "-o", "-"};
  const Texts quantize = {"quantize", "-m", model_folder, "-o", "x.gguf"};
  struct Group {
    Texts command;
    std::vector<Texts> more;
  };
  const std::vector<Group> groups = {
      // missing
      {{"run"}, {{}, {"-p", "x"}, {"-m", model_folder}}},
      {{"chat"}, {{}}},
      {{"serve"}, {{}}},
      {{"bench"}, {{}}},
      {{"collect"}, {{}, {"-m", model_folder}, {"-m", model_folder, "-f", tasks}}},
      {{"train"},
       {{},
        {"linear"},
        {"linear", "x.h5"},
        {"square", "x.h5", "-o", "x"},
        {"mlp", "x.h5", "-o", "x", "--ridge", "5"}}},
      {{"calibrate"}, {{}, {"--surrogate", surrogate_folder}}},
      {{"eval"}, {{}, {"-m", model_folder}, {"-m", model_folder, "--tasks", tasks}}},
      {{"prefix"},
       {{},
        {"list"},
        {"show", "--prefix-store", "x"},
        {"remove", "--prefix-store", "x"},
        {"remove", "--prefix-store", "x", "12"},
        {"list", "--prefix-store", "x", "-m", model_folder},
        {"add", "--prefix-store", "x", "-m", model_folder},
        {"add", "--prefix-store", "x", "-f", "x"},
        {"add", "--prefix-store", "x", "--prefix-store-size", "much", "-f", "x", "-m",
         model_folder}}},
      {{"make-tasks"}, {{}, {"ruler"}, {"recall", "-m", model_folder}, {"square"}}},
      {{"leaderboard"}, {{}, {"x", "-o", "page.doc"}, {"x", "-o", "-", "--json", "-"}}},
      {{"convert"}, {{}, {"-m", model_folder}, {"-m", model_folder, "-o", "x"}}},
      {{"quantize"}, {{}, {"-m", model_folder}, {"-m", model_folder, "-o", "x"}}},
      {{"inspect"}, {{}, {"x", "y", "z"}, {"x", "--rows", "-1"}}},
      {{"diff"}, {{}, {"x"}, {"x", "y", "z"}}},
      {{"policies"}, {{"snpkv"}, {"snapkv", "h2o"}}},
      {{"models"}, {{"x"}, {"--json=maybe"}}},
      {{"completion"}, {{}, {"csh"}}},
      {{"manual"}, {{"x"}}},
      {{"help"}, {{"rnu"}, {"xyzzy"}}},
      // out of range, excluding each other, unknown names
      {run,
       {{"-t", "0"},
        {"-t", "-1"},
        {"-t", "4097"},
        {"-n", "-2"},
        {"-c", "0"},
        {"-c", "9999999"},
        {"--layers", "0"},
        {"--layers", "99"},
        {"--evict-ratio", "75"},
        {"--evict-ratio", "0.5"},
        {"--dry-run", "--snapshot", "x"},
        {"--dry-run", "--dump", "x"},
        {"--policy", "snapkv", "--evict-ratio", "75"},
        {"--policy", "snpkv", "--evict-ratio", "0.5"},
        {"--policy", "snapkv@evict-ratoi=1"},
        {"--policy", "snapkv", "--kv-budget", "much"},
        {"--surrogate", surrogate_folder},
        {"--threshold", "-4"},
        {"-f", "x"},
        {"--temp", "-1"},
        {"--top-p", "2"},
        {"--top-k", "-1"},
        {"--min-p", "7"},
        {"--repeat-penalty", "0"},
        {"--window", "0"},
        {"--sink", "-1"},
        {"--chunk", "0"},
        {"--page-rows", "0"},
        {"--balance", "-1"},
        {"--kv-type", "q9"},
        {"--kv-type", "auto"},
        {"--read-pages", "0"},
        {"--dtype", "int3"},
        {"--weights", "q5"},
        {"--snapshot-every", "4"},
        {"--snapshot", "-"},
        {"--resume", "-"},
        {"--append", "x"},
        {"--json-token-ids"},
        {"--dump", "-"},
        {"--system", "x", "--raw"},
        {"--rope-scale", "2"},
        {"--rope-scaling", "yarn", "--rope-scale", "0"},
        {"--seed", "-2"},
        {"--json", "x", "--dump", "x"},
        {"--config", "none.toml"},
        {"--decode-every", "-1"},
        {"--placement"},
        {"--raw=3"},
        {"--max-tokens"},
        {"--num-beams", "4"},
        {"--kokkos-x"}}},
      {chat,
       {{"-t", "0"},
        {"-f", "-"},
        {"--policy", "snapkv", "--evict-ratio", "0.5"},
        {"-n", "-2"},
        {"--question", "x"},
        {"--temp", "nan"}}},
      {serve,
       {{"-t", "0"},
        {"--port", "99999"},
        {"--host", ""},
        {"--max-sequences", "0"},
        {"--max-queue", "-1"},
        {"--kv-memory", "lots"},
        {"--drain-seconds", "-1"},
        {"--temp", "-1"},
        {"--policy", "snapkv"},
        {"--api-key", "x"}}},
      {bench,
       {{"-t", "0"},
        {"-p", "x"},
        {"--evict-ratio", "1"},
        {"-r", "0"},
        {"-o", "xml"},
        {"--columns", "x"},
        {"--layers", "99"},
        {"--seed", "-1"}}},
      {collect,
       {{"-t", "0"},
        {"--tokens-per-text", "0"},
        {"--compression", "10"},
        {"--sink", "3"},
        {"--min-tokens", "9", "--max-tokens", "8"},
        {"-f", "-"},
        {"--max-texts", "-1"}}},
      {train,
       {{"-t", "0"},
        {"--epochs", "0"},
        {"--lr", "0"},
        {"--batch", "0"},
        {"--ridge", "-1"},
        {"--validation", "1"},
        {"--hidden", "0"},
        {"--hidden", "5"},  // of an MLP
        {"--epochs", "3"},
        {"--resume", "--overwrite"},
        {"--plot", "-"},
        {"--dtype", "f64"}}},
      {calibrate,
       {{"-t", "0"},
        {"--evict-ratio", "1"},
        {"--window", "0"},
        {"--window", "32,auto"},
        {"--window", "32,"},
        {"--sink", "-1"},
        {"-o", "-"},
        {"-o", "x", "--no-store"},
        {"-c", "0"},
        {"--max-texts", "0"}}},
      {eval,
       {{"-t", "0"},
        {"--evict-ratios", "75"},
        {"--thresholds", "low"},
        {"--thresholds", "-4"},  // of kvzap alone
        {"--tasks", "-"},
        {"--tries", "0"},
        {"--tries", "2"},
        {"--pass-k", "9"},
        {"-n", "0"},
        {"--batch", "-1"},
        {"-c", "0"},
        {"--bootstrap-samples", "0"},
        {"--surrogate", "none"},
        {"--window", "0"},
        {"--window", "auto"},
        {"--parallel", "both"},
        {"--kv-type", "q9"},
        {"--read-pages", "2.5"}}},
      {make, {{"--per-task", "0"}, {"--tasks", "x"}, {"--haystack", "x"}, {"--length", "0"}}},
      {quantize, {{"-t", "0"}, {"--type", "Q9"}, {"--json", "x.gguf"}}},
  };
  for (const Group& group : groups) {
    for (const Texts& more : group.more) {
      const Texts arguments = joined(group.command, more);
      SCOPED_TRACE(fmt::format("{}", fmt::join(arguments, " ")));
      const Outcome outcome = read(arguments);
      EXPECT_EQ(outcome.status, 2) << outcome.error;
      EXPECT_NE(outcome.error, "");
      EXPECT_EQ(outcome.error.find('\n'), std::string::npos) << outcome.error;
      EXPECT_EQ(outcome.out, "");
    }
  }
}

TEST(WrongLines, SuggestACallThatIsReady) {
  const TemporaryFolder folder;
  folder.write("report.txt", "x");
  folder.write("deck.toml", "");
  folder.write("tasks.jsonl", "");
  folder.write("small.gguf", "x");
  const std::string report = folder.path() / "report.txt";
  const std::string deck = folder.path() / "deck.toml";
  const std::string tasks = folder.path() / "tasks.jsonl";
  const std::string gguf = folder.path() / "small.gguf";
  const std::pair<Texts, std::string> lines[] = {
      {{"run", "Qwen3", "Why is it?"}, "kvzap run -m Qwen3 -p 'Why is it?'"},
      {{"run", "-m", "x", "Why is it?"}, "kvzap run -m x -p 'Why is it?'"},
      {{"run", "-m", "x", "Why", "is", "it?"}, "kvzap run -m x -p 'Why is it?'"},
      {{"run", "-m", "x", "-p", "Why", "is", "it"}, "kvzap run -m x -p 'Why is it'"},
      {{"run", "Why is it?"}, "kvzap run -m MODEL -p 'Why is it?'"},
      {{"run", gguf, "Why is it?"}, "kvzap run -m " + gguf + " -p 'Why is it?'"},
      {{"run", "-m", "x", report, "It's what?"},
       "kvzap run -m x -f " + report + " --question 'It'\\''s what?'"},
      {{"run", "-m", "x", "-f", report, "a\nb"},
       "kvzap run -m x -f " + report + " --question $'a\\nb'"},
      {{"run", deck}, "kvzap run --config " + deck},
      {{"chat", "x"}, "kvzap chat -m x"},
      {{"serve", "x", "--port", "80"}, "kvzap serve -m x --port 80"},
      {{"eval", "-m", "x", tasks}, "kvzap eval -m x --tasks " + tasks},
      {{"convert", gguf, "out"}, "kvzap convert -m " + gguf + " -o out"},
      {{"quantize", "in", "out.gguf", "Q4_K_M"}, "kvzap quantize -m in -o out.gguf --type Q4_K_M"},
      {{"-m", "x", "-p", "y z"}, "kvzap run -m x -p 'y z'"},
      {{"-m", "x"}, "kvzap chat -m x"},
      {{"--model=x", "--max-new-tokens=5", "-p", "y"}, "kvzap run --model x --n-predict 5 -p y"},
      {{"-m", "x", "--port", "80"}, "kvzap serve -m x --port 80"},
      {{gguf}, "kvzap chat -m " + gguf},
      {{gguf, "Hello there"}, "kvzap run -m " + gguf + " -p 'Hello there'"},
      {{"What is it?"}, "kvzap run -m MODEL -p 'What is it?'"},
      {{"rnu", "-m", "x", "-p", "y"}, "kvzap run -m x -p y"},
      {{"generate", "-m", "x", "-p", "y", "--temperature", "1"}, "kvzap run -m x -p y --temp 1"},
      {{"complete", "x", "Once upon"}, "kvzap run -m x -p 'Once upon'"},
      {{"cli", "-m", "x"}, "kvzap chat -m x"},
      {{"server", "x", "-np", "4"}, "kvzap serve -m x --max-sequences 4"},
      {{"show", "x.h5"}, "kvzap inspect x.h5"},
      {{"pull", "Qwen/Qwen3-8B"}, "hf download Qwen/Qwen3-8B --local-dir Qwen3-8B"},
      {{"pull"}, "hf download OWNER/NAME --local-dir DIR"},
      {{"pull", "hf.co/a/b:Q8_0"}, "hf download a/b --include '*Q8_0*.gguf' --local-dir b"},
      {{"download", "a/b", "--local-dir", "x"}, "hf download a/b --local-dir x"},
      {{"run", "-hf", "https://huggingface.co/a/b", "-p", "y"},
       "hf download a/b --local-dir b && kvzap run -m b -p y"},
      {{"eval", "new.jsonl", "-m", "x"}, "kvzap eval --tasks new.jsonl -m x"},
      {{"collect", "new.txt", "-m", "x"}, "kvzap collect -f new.txt -m x"},
      {{"run", "-m", "x", report, "new.txt", "Why?"},
       "kvzap run -m x -f " + report + " -f new.txt --question 'Why?'"},
      {{"calibrate", model_folder, surrogate_folder, report},
       "kvzap calibrate -m " + model_folder + " --surrogate " + surrogate_folder + " -f " + report},
      {{"calibrate", surrogate_folder}, "kvzap calibrate -m MODEL --surrogate " + surrogate_folder},
      {{"quantize", "in", "Q4_K_M", "out.gguf"}, "kvzap quantize -m in --type Q4_K_M -o out.gguf"},
      {{"generate", "--help"}, "kvzap help run"},
      {{"RUN", "-m", "x", "-p", "y"}, "kvzap run -m x -p y"},
      {{"inspect", "-m", "x"}, "kvzap inspect x"},
      {{"help", "generate"}, "kvzap help run"},
      {{"run", "-m", "x", "-p", "y", "-cnv"}, "kvzap chat -m x -p y"},
      {{"run", "-m", "x", "-p", "y z", "--tensor-parallel-size", "2"},
       "mpirun -n 2 kvzap run -m x -p 'y z'"},
      {{"run", "-hf", "Qwen/Qwen3-8B-GGUF:Q4_K_M", "-p", "y"},
       "hf download Qwen/Qwen3-8B-GGUF --include '*Q4_K_M*.gguf' --local-dir Qwen3-8B-GGUF && "
       "kvzap run -m Qwen3-8B-GGUF -p y"},
  };
  for (const auto& [arguments, call] : lines) {
    SCOPED_TRACE(fmt::format("{}", fmt::join(arguments, " ")));
    const driver::Reading reading = parse(arguments);
    EXPECT_EQ(reading.status, 2);
    const std::string mark = "did you mean: ";
    const std::size_t at = reading.error.find(mark);
    ASSERT_NE(at, std::string::npos) << reading.error;
    EXPECT_EQ(reading.error.substr(at + mark.size()), call);
    const std::size_t kvzap = call.find("kvzap ");
    if (kvzap == std::string::npos) continue;
    const Texts words = shell_split(call.substr(kvzap));
    const driver::Reading better = parse({words.begin() + 1, words.end()});
    EXPECT_EQ(better.status, 0) << better.error;
  }
}

TEST(WrongLines, SuggestNoCallBesideAnotherFault) {
  const TemporaryFolder folder;
  folder.write("report.txt", "x");
  const std::string report = folder.path() / "report.txt";
  const Texts run = {"run", "-m", "x"};
  const std::pair<Texts, std::string> lines[] = {
      // Values of unknown options are no prompts, questions or outputs.
      {{"generate", "--model", "x", "--prompt", "y", "--max-kv-size", "256"},
       "did you mean kvzap run? The next error: --max-kv-size is an option of MLX: --keep-tokens"},
      {{"generate", "-m", "x", "--bogus", "8"}, "The next error: unknown option --bogus"},
      {{"lm_eval", "--model", "hf", "--model_args", "pretrained=X", "--tasks", "y"},
       "did you mean kvzap eval? The next error: --model_args is an option of lm_eval: -m takes"},
      {{"perplexity", "-m", "x", "-f", report},
       "did you mean kvzap eval? The next error: unknown "},
      {{"-m", "x", "--bogus", "8"}, "unknown option --bogus"},
      {joined(run, {"-hf", "a/b", "--bogus", "8"}), "--local-dir b && kvzap run …"},
      {joined(run, {"--question", "y", "-cnv"}), "did you mean: kvzap chat …"},
      {{"eval", "-m", "x", "--tasks", "y", "z"},
       "unexpected argument 'z'; kvzap eval takes options"},
      {{"convert", "-m", "x", report}, "unexpected argument"},  // it exists
      // llama.cpp's options with one dash are no short ones with a value.
      {joined(run, {"-ptc", "5"}), "-ptc is an option of llama.cpp"},
      {joined(run, {"-fit", "off"}), "-fit is an option of llama.cpp"},
      {joined(run, {"-mm", "y"}), "-mm is an option of llama.cpp"},
      {joined(run, {"-cd", "512"}), "-cd is an option of llama.cpp and vLLM: there is no model"},
      {joined(run, {"-tbd", "4"}), "there is no model for drafts"},
      {joined(run, {"-ngld", "4"}), "there is no model for drafts"},
      {joined(run, {"-nkvo"}), "-nkvo is an option of llama.cpp"},
      {joined(run, {"-cmoe"}), "-cmoe is an option of llama.cpp"},
      {joined(run, {"-nxy"}), "unknown option -nxy"},
      {{"bench", "-m", "x", "-pg", "16,4"}, "-pg is an option of llama.cpp"},
      {{"bench", "-m", "x", "-mmp", "1"}, "-mmp is an option of llama.cpp"},
      // The next option is no value.
      {joined(run, {"--threshold", "--sink", "3"}),
       "--threshold needs a value; if --sink is one: "
       "--threshold=--sink"},
      {joined(run, {"--policy", "--evict-ratio", "0.5"}), "--policy needs a value"},
      {joined(run, {"--thinking", "-p", "hi"}), "--thinking needs a value"},
      {{"run", "-m", "-p", "hi"}, "-m needs a value; if -p is one: --model=-p"},
      {joined(run, {"-f", "--temperature", "1"}), "-f needs a value"},
      {joined(run, {"-p"}), "-p needs a value"},
      {joined(run, {"--max-tokens"}), "--max-tokens needs a value"},
      {joined(run, {"-qn"}), "-qn needs a value"},
  };
  for (const auto& [arguments, part] : lines) {
    SCOPED_TRACE(fmt::format("{}", fmt::join(arguments, " ")));
    const driver::Reading reading = parse(arguments);
    EXPECT_EQ(reading.status, 2);
    EXPECT_NE(reading.error.find(part), std::string::npos) << reading.error;
    for (const char* invented : {"--question 256", "--question 8", " -o ", "--prompt 8"}) {
      EXPECT_EQ(reading.error.find(invented), std::string::npos) << reading.error;
    }
  }
  // A dash is no option yet.
  driver::CommandLine line;
  EXPECT_EQ(driver::read_arguments(line, joined(run, {"-p", "- a list", "-n5", "--threshold", "-4",
                                                      "--json", "-", "--question=-n"}))
                .error,
            "");
  EXPECT_EQ(line.run_options.prompt, "- a list");
  EXPECT_EQ(line.run_options.new_tokens, 5);
}

TEST(WrongLines, NameWhatIsMeant) {
  expect_errors({},
                {{{"xyzzy"},
                  {"unknown command 'xyzzy'",
                   "expected run, chat, serve, prefix, bench, collect, train, calibrate, "
                   "eval, make-tasks, leaderboard, convert, quantize, inspect, diff, policies or "
                   "models"}},
                 {{"ps"}, {"kvzap serve runs one model in the foreground"}},
                 {{"list"}, {"no store of models", "kvzap models"}},
                 {{"--hlep"}, {"did you mean --help?"}},
                 {{"run", "-m", model_folder}, {"no prompt", "-p", "-f"}},
                 {{"bench"}, {"no model", "-m"}}});
  const Outcome bare = read(Texts{});
  EXPECT_EQ(bare.status, 2);
  EXPECT_EQ(bare.out, read({"--help"}).out);
  const Texts run = {"run", "-m", model_folder, "-p", "one"};
  expect_errors(
      run, {{{"-tb", "4"}, {"-tb is an option of llama.cpp: ", "-t sets the threads"}},
            {{"-b", "512"}, {"-b is an option of llama.cpp: ", "--chunk"}},
            {{"-ctk", "q8_0"}, {"-ctk is an option of llama.cpp", "--kv-type q8"}},
            {{"--logit-bias", "x"}, {"--logit-bias is an option of", "--json-schema", "serve"}},
            {{"--api-key", "x"}, {"--api-key-file FILE"}},
            {{"--parallel", "4"}, {"kvzap serve has it, as --max-sequences"}},
            {{"--do-sample"}, {"--temp above 0"}},
            {{"--max-length", "9"}, {"the prompt's tokens", "-n"}},
            {{"--max-tokns", "9"}, {"did you mean --max-tokens?"}},
            {{"--port", "80"}, {"unknown option --port of kvzap run; kvzap serve has it"}},
            {{"--policy", "kvzap_mlp", "--surrogate", surrogate_folder, "--threshold", "-4"},
             {"there is no policy \"kvzap_mlp\"; did you mean kvzap?"}},
            {{"--policy", "knormm", "--layerwise", "--evict-ratio", "0.5"},
             {"there is no policy \"knormm\"; did you mean knorm?"}},
            {{"--policy", "SnapKV", "--evict-ratio", "0.5"}, {"did you mean snapkv?"}},
            {{"--policy", "ExpectedAttentionPress", "--evict-ratio", "0.5"},
             {"did you mean expected-attention?"}},
            {{"--prot", "80"}, {"unknown option --prot"}}});
  expect_errors({"bench", "-m", model_folder},
                {{{"--max-tokens", "5"}, {"kvzap run, chat and eval have it, as --n-predict"}}});
  // Similar letters are no similar meaning.
  const driver::CommandLine line;
  for (const char* name : {"keep", "max-x", "top-n", "min-k", "max-keys", "prompts-file"}) {
    EXPECT_EQ(driver::nearest_option(*line.app.get_subcommand("run"), name), "") << name;
  }
  const std::pair<const char*, const char*> misspelt[] = {{"n_predcit", "n-predict"},
                                                          {"npredict", "n-predict"},
                                                          {"evict_raito", "evict-ratio"},
                                                          {"temprature", "temperature"},
                                                          {"questoin", "question"}};
  for (const auto& [name, meant] : misspelt) {
    EXPECT_EQ(driver::nearest_option(*line.app.get_subcommand("run"), name), meant);
  }
}

TEST(ForeignFlags, AreKnownOnceAndLeadSomewhere) {
  const driver::CommandLine line;
  std::set<std::string_view> names, partial;  // what is for some commands alone may be there again
  using Remedy = driver::ForeignFlag::Remedy;
  for (const driver::ForeignFlag& flag : driver::foreign_flags()) {
    const bool is_alias = flag.remedy == Remedy::alias;
    for (const std::string_view name : flag.names) {
      EXPECT_TRUE(names.insert(name).second || partial.count(name)) << name << " is there twice";
      if (is_alias || !flag.where.empty()) partial.insert(name);
      EXPECT_EQ(name.find('_'), std::string_view::npos) << name;
    }
    const std::string option(is_alias ? flag.text.substr(0, flag.text.find('=')) : flag.where);
    if (!option.empty()) {
      EXPECT_NE(driver::commands_with(line.app, option), "") << option;
    }
    if (flag.remedy == Remedy::ignored) {
      EXPECT_NE(flag.where, "") << flag.names.front();
    }
  }
}

TEST(ForeignFlags, MeanWhatTheyMeanThere) {
  const Texts plain = {"run", "-m", "x", "-p", "one"};
  for (const Texts& flags : std::vector<Texts>{{"--max-tokens", "5"},
                                               {"--max_new_tokens=5"},
                                               {"--num_predict", "5"},
                                               {"--n_predict", "5"},
                                               {"-n-predict", "5"},
                                               {"\u2014n-predict", "5"},
                                               {"\u2013n", "5"}}) {
    driver::CommandLine line;
    SCOPED_TRACE(flags.front());
    EXPECT_EQ(driver::read_arguments(line, joined(plain, flags)).error, "");
    EXPECT_EQ(line.run_options.new_tokens, 5);
  }
  driver::CommandLine line;
  const driver::Reading reading =
      driver::read_arguments(line, joined(plain, {"--temperature",
                                                  "0.5",
                                                  "--repetition_penalty",
                                                  "1.1",
                                                  "--max-model-len",
                                                  "99",
                                                  "-s",
                                                  "7",
                                                  "-sys",
                                                  "Be brief.",
                                                  "--think",
                                                  "--dtype",
                                                  "float16",
                                                  "--stream",
                                                  "-ngl",
                                                  "99",
                                                  "-fa",
                                                  "on",
                                                  "--no-mmap",
                                                  "-no-cnv",
                                                  "--num-beams",
                                                  "1"}));
  EXPECT_EQ(reading.error, "");
  EXPECT_EQ(reading.notes.size(), 6u);
  EXPECT_EQ(line.run_options.sampling.temperature, 0.5);
  EXPECT_EQ(line.run_options.sampling_flags.repeat_penalty, 1.1);
  EXPECT_EQ(line.run_options.max_context, 99);
  EXPECT_EQ(line.run_options.sampling.seed, 7u);
  EXPECT_EQ(line.run_options.system, "Be brief.");
  EXPECT_EQ(line.run_options.thinking, "on");
  EXPECT_EQ(line.run_options.dtype, "f16");
  driver::CommandLine served;
  EXPECT_EQ(driver::read_arguments(served, {"serve", "-m", "x", "--max-num-seqs", "3",
                                            "--served-model-name", "y", "--temperature", "1"})
                .error,
            "");
  EXPECT_EQ(served.serve_options.scheduling.max_sequences, 3);
  EXPECT_EQ(served.serve_options.alias, "y");
  EXPECT_EQ(served.serve_options.sampling.temperature, 1);
  // Values of own options stay as they are, and so do own options of a command.
  driver::CommandLine collected;
  EXPECT_EQ(driver::read_arguments(collected, {"collect", "--model=--temperature", "-f", "x", "-o",
                                               "y", "--max-tokens", "9"})
                .error,
            "");
  EXPECT_EQ(collected.collect_options.model, "--temperature");
  EXPECT_EQ(collected.collect_options.rules.max_tokens, 9);
  // A deck takes the same names.
  const TemporaryFolder folder;
  folder.write("deck.toml", "max_new_tokens = 5\ntemperature = 0.5\n");
  driver::CommandLine decked;
  EXPECT_EQ(read(decked,
                 {"run", "-m", model_folder, "-p", "one", "--config", folder.path() / "deck.toml"})
                .error,
            "");
  EXPECT_EQ(decked.run_options.new_tokens, 5);
  EXPECT_EQ(decked.run_options.sampling.temperature, 0.5);
}

TEST(ForeignFlags, DependOnTheCommand) {
  driver::CommandLine line;
  EXPECT_EQ(driver::read_arguments(
                line, {"eval", "-m", "x", "--tasks", "y", "--batch_size", "8", "--limit", "3",
                       "--output_path", "z", "--compression_ratio", "0.5", "--num_fewshot", "0"})
                .error,
            "");
  EXPECT_EQ(line.eval_options.batch, 8);
  EXPECT_EQ(line.eval_options.output, "z");
  EXPECT_EQ(line.eval_options.evict_ratios, Texts{"0.5"});
  driver::CommandLine other;
  const Texts run = {"run", "-m", "x", "-p", "one"};
  const driver::Reading reading = driver::read_arguments(
      other, joined(run, {"--compression-ratio", "0.5", "--torch-dtype", "BF16", "--ctx", "99",
                          "--weights", "Q4_K_M", "--mirostat", "0", "--verbose",
                          "--no-context-shift", "-mmp", "0"}));
  EXPECT_EQ(reading.error, "");
  EXPECT_EQ(reading.notes.size(), 4u);
  EXPECT_EQ(other.run_options.pruning.amount.evict_ratio, 0.5);
  EXPECT_EQ(other.run_options.dtype, "bf16");
  EXPECT_EQ(other.run_options.weights, "q4");
  EXPECT_EQ(other.run_options.max_context, 99);
  driver::CommandLine served;
  EXPECT_EQ(driver::read_arguments(
                served, {"serve", "-m", "x", "--enable-prefix-caching", "--disable-log-requests",
                         "--metrics", "--trust-remote-code", "True"})
                .notes.size(),
            4u);
  expect_errors({"run", "-m", model_folder, "-p", "one"},
                {{{"--batch-size", "8"}, {"an option of llama.cpp: --prefill sparse"}},
                 {{"--limit", "8"}, {"--limit is an option of lm_eval; kvzap eval"}},
                 {{"--output_path", "x"}, {"kvzap eval has it, as --output"}},
                 {{"--press_name", "x"}, {"--policy NAME"}},
                 {{"--kv-bits", "8"}, {"--kv-type q8"}},
                 {{"--block-size", "8"}, {"--page-rows"}},
                 {{"--mirostat", "2"}, {"the samplers are"}},
                 {{"--dtype", "auto"}, {"--dtype is auto", "the default is bf16"}},
                 {{"--kv-type", "q8_0"}, {"did you mean q8?"}},
                 {{"--kv-type", "q3_K"}, {"did you mean q3?"}},
                 {{"-c", "0"}, {"-c is 0; expected at least 1; without it: the model's"}},
                 {{"-t", "-1"}, {"--threads is -1; expected 1 to 4096; without it"}},
                 {{"--top-k", "-1"}, {"--top-k is -1; expected 0 or more; 0: all tokens"}}});
  expect_errors({"bench", "-m", model_folder},
                {{{"--output-path", "x"}, {"kvzap eval has it, as --output"}},
                 {{"--batch-size", "8"}, {"is an option of llama.cpp"}}});
  // A cache in 16 bits is none of kvzap's defaults: bf16 is.
  expect_errors({"run", "-m", model_folder, "-p", "one"},
                {{{"--cache-type-k", "f16"}, {"--kv-type q8, q4"}}});
  driver::CommandLine cached;
  EXPECT_EQ(driver::read_arguments(cached, joined(run, {"--cache-type-k", "bf16"})).notes.size(),
            1u);
}

TEST(HelpAndVersion, Everywhere) {
  const driver::CommandLine line;
  const std::string version = parse({"--version"}).out;
  EXPECT_EQ(version.rfind("kvzap ", 0), 0u);
  for (const char* flag : {"-V", "-version", "version"}) EXPECT_EQ(parse({flag}).out, version);
  const std::string general = parse({"--help"}).out;
  for (const Texts& arguments :
       std::vector<Texts>{{"-h"}, {"help"}, {"-?"}, {"-help"}, {"help", "help"}}) {
    EXPECT_EQ(parse(arguments).out, general);
  }
  for (const CLI::App* command : line.app.get_subcommands({})) {
    const std::string& name = command->get_name();
    SCOPED_TRACE(name);
    const std::string help = parse({name, "--help"}).out;
    EXPECT_NE(help.find("Usage: kvzap " + name), std::string::npos);
    for (const Texts& arguments : std::vector<Texts>{{"help", name},
                                                     {name, "help"},
                                                     {name, "-h"},
                                                     {name, "--bogus", "--help"},
                                                     {name, "--bogus=3", "x", "y", "z", "-h"}}) {
      const driver::Reading reading = parse(arguments);
      EXPECT_EQ(reading.out, help);
      EXPECT_EQ(reading.status, 0);
      EXPECT_EQ(reading.error, "");
    }
    EXPECT_EQ(parse({name, "-V"}).out, version);
    EXPECT_EQ(parse({name, "--version"}).out, version);
  }
  EXPECT_EQ(parse({"run", "-m", "x", "--window", "wide", "--help"}).out,
            parse({"help", "run"}).out);
  EXPECT_NE(parse({"run", "-m", "x", "-p", "help"}).out, parse({"help", "run"}).out);
}

TEST(Examples, OfEveryHelpAreValid) {
  const driver::CommandLine line;
  for (const CLI::App* command : line.app.get_subcommands({})) {
    const std::string& name = command->get_name();
    SCOPED_TRACE(name);
    const std::string help = parse({name, "--help"}).out;
    const std::string mark = "\nExamples:\n";
    const std::size_t begin = help.find(mark);
    ASSERT_NE(begin, std::string::npos);
    std::string text = help.substr(begin + mark.size());
    for (std::size_t at; (at = text.find("\\\n")) != std::string::npos;) text.erase(at, 2);
    std::istringstream lines(text);
    int examples = 0;
    for (std::string example; std::getline(lines, example); ++examples) {
      Texts words = shell_split(example.substr(0, example.find(" > ")));
      ASSERT_GE(words.size(), 2u);
      EXPECT_EQ(words[0], "kvzap");
      EXPECT_EQ(words[1], name);
      const driver::Reading reading = parse({words.begin() + 1, words.end()});
      EXPECT_EQ(reading.error, "") << example;
      EXPECT_EQ(reading.notes.size(), 0u) << example;
    }
    EXPECT_GE(examples, 1);
    EXPECT_LE(examples, 3);
  }
}

TEST(RandomSeed, IsDrawnOnceAndCanBeRepeated) {
  for (const char* command : {"run", "eval"}) {
    std::set<std::uint64_t> seeds;
    for (int i = 0; i < 3; ++i) {
      driver::CommandLine line;
      const Texts of_run = {"-p", "one"};
      const Texts of_eval = {"--tasks", "x", "--policies", "none", "-o", "y"};
      const Texts arguments = joined({command, "-m", model_folder, "--seed", "-1"},
                                     std::string(command) == "run" ? of_run : of_eval);
      const Outcome outcome = read(line, arguments);
      EXPECT_EQ(outcome.error, "");
      const std::uint64_t seed = std::string(command) == "run" ? line.run_options.sampling.seed
                                                               : line.eval_options.sampling.seed;
      ASSERT_EQ(outcome.notes.size(), 1u);
      EXPECT_NE(outcome.notes[0].find(fmt::format("--seed {} repeats", seed)), std::string::npos);
      seeds.insert(seed);
    }
    EXPECT_GT(seeds.size(), 1u);
  }
  driver::CommandLine line;
  EXPECT_EQ(read(line, {"serve", "-m", model_folder, "--seed", "-1"}).error, "");
  EXPECT_FALSE(line.serve_options.seed.has_value());
}

}  // namespace
}  // namespace kvzap::test
