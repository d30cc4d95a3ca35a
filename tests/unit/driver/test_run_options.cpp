// Values and combinations of the options of `kvzap run` and `kvzap bench`, and their messages.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "unit/driver/command_lines.hpp"
#include "unit/temporary_folder.hpp"

namespace kvzap::test {
namespace {

using Texts = std::vector<std::string>;

/// `kvzap run` of a prompt of one token.
const Texts plain = {"run", "-m", model_folder, "-p", "one", "-n", "0"};

Texts questions(const Texts& flags) {
  driver::CommandLine line;
  Texts arguments = plain;
  arguments.insert(arguments.end(), flags.begin(), flags.end());
  const Outcome outcome = read(line, arguments);
  EXPECT_EQ(outcome.status, 0) << outcome.error;
  return line.run_options.questions;
}

TEST(CommandLine, TakesTextsAsTheyStand) {
  const Texts texts = {"[red, green]",      "[a]",   "{}", "%%",        "a, b", "",
                       "say \"[x]\"\nthen", "--raw", "-n", "--kokkos-x"};
  Texts apart, joined;
  for (const std::string& text : texts) {
    apart.insert(apart.end(), {"--question", text});
    joined.push_back("--question=" + text);
  }
  EXPECT_EQ(questions(apart), texts);
  EXPECT_EQ(questions(joined), texts);
  const TemporaryFolder folder;
  const std::string deck = folder.path() / "deck.toml";
  folder.write("deck.toml", "question = ['[red, green]', '[a]', '{}', '%%', '--raw', '']\n");
  EXPECT_EQ(questions({"--config", deck}), (Texts{"[red, green]", "[a]", "{}", "%%", "--raw", ""}));
  folder.write("deck.toml", "question = '[red, green]'\n");
  EXPECT_EQ(questions({"--config", deck}), Texts{"[red, green]"});
  EXPECT_EQ(questions({"--question", "-tb", "--question=-ngl"}), (Texts{"-tb", "-ngl"}));
  expect_errors(plain, {{{"--question", "red", "green"},
                         {"unexpected argument 'green'", "--question 'red green'"}}});
}

TEST(CommandLine, ReadsNumbers) {
  driver::CommandLine line;
  Texts arguments = plain;
  arguments.insert(arguments.end(), {"--window", "0100", "--sink", "+3"});
  EXPECT_EQ(read(line, arguments).status, 0);
  EXPECT_EQ(line.run_options.pruning.window, 100);
  EXPECT_EQ(line.run_options.pruning.sink, 3);
  expect_errors(
      {"run", "-m", model_folder, "-p", "one"},
      {{{"--n-predict="}, {"--n-predict is ''", "; expected ", "a whole number"}},
       {{"--n-predict= 5"}, {"--n-predict is ' 5'", "; expected ", "a whole number"}},
       {{"--n-predict=5x"}, {"--n-predict is 5x", "; expected ", "a whole number"}},
       {{"--n-predict=0x10"}, {"--n-predict is 0x10", "; expected ", "a whole number"}},
       {{"--n-predict=1e3"}, {"--n-predict is 1e3", "; expected ", "a whole number"}},
       {{"--n-predict=99999999999999999999"},
        {"--n-predict is 99999999999999999999", "; expected ", "to 9223372036854775807"}},
       {{"--window=4294967300"},
        {"--window is 4294967300", "; expected ", "a whole number within range"}},
       {{"--seed=-2"}, {"--seed is -2", "; expected ", "0 or more"}},
       {{"--seed=18446744073709551616"},
        {"--seed is 18446744073709551616", "; expected ", "from 0 to 18446744073709551615"}},
       {{"--temp="}, {"--temp is ''", "; expected ", "a number"}},
       {{"--temp=0x1p3"}, {"--temp is 0x1p3", "; expected ", "a number"}},
       {{"--temp=1 "}, {"--temp is '1 '", "; expected ", "a number"}},
       {{"--temp=1e999"}, {"--temp is 1e999", "; expected ", "range of double"}},
       {{"--rope-scale=2x"}, {"--rope-scale is 2x", "; expected ", "a number"}},
       {{"--snapshot-compress="}, {"--snapshot-compress is ''", "; expected ", "a whole number"}}});
  expect_errors(plain, {{{"--raw=3"}, {"--raw is 3", "true or false"}},
                        {{"--temp"}, {"--temp needs a value"}},
                        {{"--\x1b[2Jx"}, {"unknown option --\\x1b[2Jx"}},
                        {{"--top-k", "1", "--top-k", "2"}, {"--top-k is given more than once"}},
                        {{"-t", "many"}, {"--threads is many; expected a whole number"}}});
}

TEST(CommandLine, ChecksFlagsOfKokkos) {
  expect_errors(plain, {{{"--kokkos-foo"}, {"unknown option --kokkos-foo", "knows --kokkos-help"}},
                        {{"--kokkos-disable-warning"}, {"did you mean --kokkos-disable-warnings?"}},
                        {{"--kokkos-device-id"}, {"expected --kokkos-device-id=VALUE"}},
                        {{"--kokkos-device-id=one"},
                         {"--kokkos-device-id is 'one'; expected a whole number"}}});
}

TEST(RunOptions, OutOfRangeOrContradictory) {
  expect_errors(
      {"run", "-m", model_folder, "-p", "one"},
      {{{"--window", "0"}, {"--window is 0", "at least 1"}},
       {{"--window", "-3"}, {"--window is -3", "at least 1"}},
       {{"--window", "3.5"}, {"--window is 3.5", "expected a whole number"}},
       {{"--window", "Auto"}, {"--window is Auto", "expected a whole number"}},
       {{"--window", "auto"}, {"--window auto needs --surrogate DIR"}},
       {{"--window", "auto", "--policy", "snapkv", "--evict-ratio", "0.5"},
        {"--window auto needs --surrogate DIR"}},
       {{"--window", "99999999999"}, {"--window is 99999999999", "expected a whole number"}},
       {{"--sink", "-1"}, {"--sink is -1", "0 or more"}},
       {{"--chunk", "0"}, {"--chunk is 0", "at least 1"}},
       {{"--page-rows", "0"}, {"--page-rows is 0", "1 to"}},
       {{"--read-pages", "0"}, {"--read-pages is '0'", "at least 1", "0.25", "all"}},
       {{"--read-pages", "1.5"}, {"--read-pages is '1.5'"}},
       {{"--read-pages", "0.0"}, {"--read-pages is '0.0'"}},
       {{"--read-pages", "nan"}, {"--read-pages is 'nan'"}},
       {{"--read-pages", "some"}, {"--read-pages is 'some'"}},
       {{"--read-pages", "0.5x"}, {"--read-pages is '0.5x'"}},
       {{"--read-pages", "99999999999999999999"}, {"--read-pages is '99999999999999999999'"}},
       {{"-n", "-2"}, {"-n is -2", "0 or more, or -1"}},
       {{"-c", "0"}, {"-c is 0", "at least 1"}},
       {{"-c", "-5"}, {"-c is -5", "at least 1"}},
       {{"-c", "5000"}, {"-c is 5000", "max_position_embeddings is 4096"}},
       {{"--rope-scaling", "yarn"}, {"--rope-scaling yarn needs --rope-scale"}},
       {{"--rope-scale", "4"}, {"--rope-scale needs --rope-scaling"}},
       {{"--rope-scaling", "none", "--rope-scale", "2"}, {"--rope-scale", "it is none"}},
       {{"--rope-scaling", "longrope"}, {"--rope-scaling: longrope", "{none,linear,dynamic,yarn}"}},
       {{"--rope-scaling", "yarn", "--rope-scale", "nan"}, {"--rope-scale nan", "1 to 1000000"}},
       {{"--rope-scaling", "dynamic", "--rope-scale", "0"}, {"--rope-scale 0", "1 to 1000000"}},
       {{"--rope-scaling", "linear", "--rope-scale", "2", "-c", "8193"},
        {"-c is 8193", "longest context with RoPE scaling linear is 8192"}},
       {{"--surrogate", surrogate_folder, "--threshold", "nan"}, {"--threshold is NaN"}},
       {{"--surrogate", surrogate_folder, "--threshold", "low"},
        {"--threshold is low", "expected a number"}},
       {{"--surrogate", surrogate_folder}, {"--surrogate needs --threshold"}},
       {{"--threshold", "-4"}, {"--threshold has no effect without --surrogate"}},
       {{"--prune", "always"}, {"--prune always needs --surrogate"}},
       {{"--prune", "some"}, {"--prune: some", "{none,prefill,always}"}},
       {{"--prefill", "thin"}, {"--prefill: thin", "{dense,sparse}"}},
       {{"--dtype", "f64"}, {"--dtype: f64", "{f32,bf16,f16}"}},
       {{"--evict-ratio", "0.5"}, {"--evict-ratio has no effect without --dry-run"}},
       {{"--dry-run", "--evict-ratio", "1"}, {"--evict-ratio is 1", "less than 1"}},
       {{"--temp", "-1"}, {"--temp is -1", "0 or more"}},
       {{"--top-k", "-1"}, {"--top-k is -1", "0 or more"}},
       {{"--top-p", "0"}, {"--top-p is 0", "more than 0"}},
       {{"--top-p", "1.5"}, {"--top-p is 1.5", "at most 1"}},
       {{"--seed", "-2"}, {"--seed", "-2", "0 or more"}},
       {{"-f", "x"}, {"-p and -f both"}},
       {{"--snapshot", "-"}, {"--snapshot cannot be standard output"}},
       {{"--snapshot", "x", "--json", "x"}, {"--json and --snapshot both name the file x"}},
       {{"--wnidow", "3"}, {"unknown option --wnidow", "did you mean --window?"}},
       {{"--treshold=3"}, {"unknown option --treshold", "did you mean --threshold?"}},
       {{"--zzzzzz"}, {"unknown option --zzzzzz"}},
       {{"one"}, {"unexpected argument 'one'"}},
       {{"--window"}, {"--window"}},
       {{"-p", "two"}, {"--prompt"}}});
}

TEST(RunOptions, PoliciesAndBudgets) {
  const TemporaryFolder temporary;
  const std::string folder = temporary.path();
  expect_errors(
      {"run", "-m", model_folder, "-p", "one two three", "--question", "four"},
      {{{"--policy", "snpkv", "--evict-ratio", "0.5"}, {"snpkv", "did you mean snapkv?"}},
       {{"--policy", "snapkv:windw=3", "--evict-ratio", "0.5"}, {"windw", "did you mean window?"}},
       {{"--policy", "snapkv:window=0", "--evict-ratio", "0.5"}, {"window", "\"0\"", "from 1"}},
       {{"--policy", "snapkv:window=wide", "--evict-ratio", "0.5"},
        {"window", "\"wide\"", "whole number"}},
       {{"--policy", "snapkv+adda", "--evict-ratio", "0.5"}, {"adda", "did you mean ada?"}},
       {{"--policy", "ada", "--evict-ratio", "0.5"}, {"ada is a modifier"}},
       {{"--policy", "snapkv+tova", "--evict-ratio", "0.5"}, {"snapkv and tova are both policies"}},
       {{"--policy", "qfilter", "--evict-ratio", "0.5"}, {"qfilter needs"}},
       {{"--policy", "qfilter:filters=" + folder + "/none", "--evict-ratio", "0.5"},
        {"no such file"},
        1},
       {{"--policy", "snapkv"},
        {"--policy snapkv needs one of --threshold, --evict-ratio, --keep-tokens and --kv-budget"}},
       {{"--policy", "snapkv", "--evict-ratio", "1"}, {"--evict-ratio is 1", "less than 1"}},
       {{"--policy", "snapkv", "--evict-ratio", "-0.1"}, {"--evict-ratio is -0.1", "at least 0"}},
       {{"--policy", "snapkv", "--evict-ratio", "nan"}, {"--evict-ratio is nan", "at least 0"}},
       {{"--policy", "snapkv", "--evict-ratio", "half"},
        {"--evict-ratio is half", "expected a number"}},
       {{"--policy", "snapkv", "--keep-tokens", "0"}, {"--keep-tokens is 0", "at least 1"}},
       {{"--policy", "snapkv", "--keep-tokens", "-5"}, {"--keep-tokens is -5", "at least 1"}},
       {{"--policy", "snapkv", "--kv-budget", "much"}, {"--kv-budget is 'much'", "1.5GiB"}},
       {{"--policy", "snapkv", "--kv-budget", "-5M"}, {"--kv-budget is '-5M'"}},
       {{"--policy", "snapkv", "--kv-budget", "5X"}, {"--kv-budget is '5X'"}},
       {{"--policy", "snapkv", "--kv-budget", "0"}, {"--kv-budget is '0'"}},
       {{"--policy", "snapkv", "--kv-budget", "0x10"}, {"--kv-budget is '0x10'"}},
       {{"--policy", "snapkv", "--evict-ratio", "0.5", "--keep-tokens", "5"},
        {"--evict-ratio and --keep-tokens", "give one of"}},
       {{"--policy", "snapkv", "--evict-ratio", "0.5", "--threshold", "5"},
        {"--threshold and --evict-ratio", "give one of"}},
       {{"--policy", "snapkv", "--keep-tokens", "5", "--kv-budget", "5M"},
        {"--keep-tokens and --kv-budget"}},
       {{"--evict-ratio", "0.5"},
        {"--evict-ratio has no effect without --dry-run, --policy or --surrogate"}},
       {{"--keep-tokens", "5"}, {"--keep-tokens has no effect without"}},
       {{"--kv-budget", "5M"}, {"--kv-budget has no effect without"}},
       {{"--policy", "kvzap", "--evict-ratio", "0.5"}, {"--policy kvzap needs --surrogate DIR"}},
       {{"--policy", "snapkv", "--evict-ratio", "0.5", "--surrogate", surrogate_folder},
        {"--surrogate is for --policy kvzap"}},
       {{"--policy", "kvzap:surrogate=" + surrogate_folder, "--evict-ratio", "0.5", "--surrogate",
         surrogate_folder},
        {"both name a surrogate"}},
       {{"--policy", "kvzap", "--surrogate", surrogate_folder}, {"--surrogate needs --threshold"}},
       {{"--policy", "snapkv", "--evict-ratio", "0.5", "--prune-after", "answer"},
        {"answer", "{context,question}"}},
       {{"--policy", "finch", "--evict-ratio", "0.5"},
        {"--policy finch needs --prune-after question"}},
       {{"--prune-after", "question"}, {"--prune-after question has no effect without --policy"}},
       {{"--policy", "knorm", "--threshold", "-3", "--prune-after", "question"},
        {"--prune-after question needs a budget"}},
       {{"--policy", "knorm+dms:threshold=-3", "--prune-after", "question"},
        {"--prune-after question needs a budget"}},
       {{"--surrogate", surrogate_folder, "--threshold", "-3", "--prune-after", "question"},
        {"--prune-after question needs a budget"}},
       {{"--policy", "simlayerkv", "--prune", "always"},
        {"--prune always cannot be combined with --policy simlayerkv", "sets its own amount"}},
       {{"--policy", "snapkv", "--evict-ratio", "0.5", "--prune-after", "question", "--prefill",
         "sparse"},
        {"--prefill dense"}},
       {{"--policy", "finch", "--threshold", "0.1", "--prune-after", "question", "--prefill",
         "sparse"},
        {"--prefill sparse of --policy finch needs a budget"}},
       {{"--policy", "finch+cam", "--evict-ratio", "0.5", "--prune-after", "question"},
        {"--policy finch cannot have cam"}},
       {{"--policy", "h2o+cam", "--threshold", "0.1"}, {"h2o with cam needs a budget"}},
       {{"--policy", "snapkv", "--evict-ratio", "0.5", "--decode-every", "4"},
        {"--decode-every needs --decode-keep or --decode-evict-ratio"}},
       {{"--policy", "snapkv", "--evict-ratio", "0.5", "--decode-every", "4", "--decode-keep", "0"},
        {"--decode-keep is 0", "at least 1"}},
       {{"--policy", "snapkv", "--evict-ratio", "0.5", "--decode-every", "4",
         "--decode-evict-ratio", "1"},
        {"--decode-evict-ratio is 1", "less than 1"}},
       {{"--policy", "snapkv", "--evict-ratio", "0.5", "--decode-every", "4", "--decode-keep", "9",
         "--decode-evict-ratio", "0.5"},
        {"give one of them"}},
       {{"--policy", "snapkv", "--evict-ratio", "0.5", "--decode-keep", "9"},
        {"--decode-keep has no effect without --decode-every"}},
       {{"--policy", "snapkv", "--evict-ratio", "0.5", "--decode-every", "-1", "--decode-keep",
         "9"},
        {"--decode-every is -1"}},
       {{"--policy", "snapkv", "--evict-ratio", "0.5", "--decode-every", "4", "--decode-keep", "9",
         "--prune", "none"},
        {"no effect with --prune none"}},
       {{"--decode-every", "4", "--decode-keep", "9"},
        {"--decode-every has no effect without --policy"}},
       {{"--policy", "snapkv+dms", "--threshold", "0.1", "--prune", "always"},
        {"--prune always cannot be combined with --policy snapkv", "--decode-every"}},
       {{"--policy", "snapkv", "--evict-ratio", "0.5", "--prune", "always"},
        {"--prune always needs a threshold", "--decode-every"}},
       {{"--policy", "snapkv+cam", "--evict-ratio", "0.5"},
        {"--policy snapkv with cam needs --decode-every N"}},
       {{"--policy", "snapkv+cam", "--evict-ratio", "0", "--decode-every", "4", "--decode-keep",
         "9", "--snapshot", "x"},
        {"--snapshot cannot be combined with --policy", "+cam"}},
       {{"--policy", "simlayerkv", "--evict-ratio", "0.5"},
        {"--evict-ratio cannot be combined with --policy simlayerkv"}},
       {{"--dump", "-"}, {"--dump cannot be standard output"}},
       {{"--dump", "x", "--json", "x"}, {"--json and --dump both name the file x"}},
       {{"--dump", "x", "--snapshot", "x"}, {"--snapshot and --dump both name the file x"}}});
  expect_errors({"run", "-m", model_folder, "-p", "one"},
                {{{"--policy", "snapkv", "--evict-ratio", "0.5", "--prune-after", "question"},
                  {"--prune-after question needs --question"}}});
}

TEST(BenchOptions, OutOfRangeOrContradictory) {
  expect_errors(
      {"bench", "-m", model_folder},
      {{{"-p", ""}, {"-p: the list is empty"}},
       {{"-p", "8,x"}, {"-p has the entry 'x'", "a whole number from 0"}},
       {{"-p", "8,"}, {"-p has the entry ''"}},
       {{"-p", ",8"}, {"-p has the entry ''"}},
       {{"-p", "8 9"}, {"-p has the entry '8 9'"}},
       {{"-p", "1.5"}, {"-p has the entry '1.5'"}},
       {{"-p", "-8"}, {"-p has the entry '-8'"}},
       {{"-p", "99999999999999999999"}, {"-p has the entry", "to 1000000000"}},
       {{"-n", "8,x"}, {"-n has the entry 'x'"}},
       {{"-d", "-1"}, {"-d has the entry '-1'"}},
       {{"-b", "0"}, {"-b has the entry '0'", "from 1"}},
       {{"-p", "0", "-n", "0"}, {"-p and -n are both 0"}},
       {{"--evict-ratio", "0.5,1"}, {"--evict-ratio has the entry '1'", "less than 1"}},
       {{"--evict-ratio", "-0.1"}, {"--evict-ratio has the entry '-0.1'"}},
       {{"--evict-ratio", "nan"}, {"--evict-ratio has the entry 'nan'"}},
       {{"--evict-ratio", "half"}, {"--evict-ratio has the entry 'half'"}},
       {{"--skew", "0.5"}, {"--skew has the entry '0.5'", "at least 1"}},
       {{"--skew", "inf"}, {"--skew has the entry 'inf'"}},
       {{"-r", "0"}, {"-r is 0"}},
       {{"-r", "x"}, {"--repetitions is x", "expected a whole number"}},
       {{"--window", "0"}, {"--window is 0"}},
       {{"--window", "auto"}, {"--window auto needs --surrogate DIR"}},
       {{"--chunk", "0"}, {"--chunk is 0"}},
       {{"--page-rows", "0"}, {"--page-rows is 0"}},
       {{"--read-pages", "-2"}, {"--read-pages is '-2'"}},
       {{"--layers", "0"}, {"--layers is 0", "1 to 6"}},
       {{"--layers", "7"}, {"--layers is 7", "1 to 6"}},
       {{"--seed", "-1"}, {"--seed", "-1"}},
       {{"--dtype", "f64"}, {"--dtype: f64"}},
       {{"-o", "xml"}, {"--output: xml", "{md,csv,json}"}},
       {{"--prune", "none"}, {"--prune: none", "{prefill,always}"}},
       {{"--surrogate", surrogate_folder}, {"--surrogate needs --threshold"}},
       {{"--threshold", "-4"}, {"--threshold has no effect without --surrogate"}},
       {{"--surrogate", surrogate_folder, "--threshold", "nan"}, {"--threshold is NaN"}},
       {{"--surrogate", surrogate_folder, "--threshold", "-4", "--evict-ratio", "0.5"},
        {"--evict-ratio and --surrogate"}},
       {{"--surrogate", surrogate_folder, "--threshold", "-4", "--skew", "2"},
        {"--skew and --surrogate"}},
       {{"--evict-raito", "0"}, {"unknown option --evict-raito", "did you mean --evict-ratio?"}},
       {{"one"}, {"unexpected argument 'one'"}}});
}

}  // namespace
}  // namespace kvzap::test
