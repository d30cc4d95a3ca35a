// Decks: unknown keys, values of the wrong type, files that are no deck; files that are named
// twice.
#include <gtest/gtest.h>

#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "unit/driver/command_lines.hpp"
#include "unit/temporary_folder.hpp"

namespace kvzap::test {
namespace {

namespace fs = std::filesystem;

struct BadDeck {
  std::string text;
  std::vector<std::string> parts;
};

TEST(Deck, Errors) {
  const TemporaryFolder folder;
  const std::string deck = folder.path() / "deck.toml";
  const std::vector<BadDeck> decks = {
      {"windw = 3", {":1: windw: unknown key", "'window'"}},
      {"model = 'x'\n\nn_perdict = 3", {":3: n_perdict: unknown key", "'n-predict'"}},
      {"config = 'x'", {"config: belongs on the command line, not in a deck"}},
      {"help = true", {"help: belongs on the command line, not in a deck"}},
      {"[run]\nwindow = 3", {"run: unknown key"}},
      {"window = 'wide'", {":1: window: ", "wide", "expected a whole number"}},
      {"window = 3.5", {"3.5", "expected a whole number"}},
      {"window = [1, 2]", {"expected one value, found a list"}},
      {"window = true", {"expected a text or a number"}},
      {"model = 'x'\nprompt = 'x'\nwindow = 'auto'", {"--window auto needs --surrogate DIR"}},
      {"raw = 1", {"expected true or false"}},
      {"threshold = 1979-05-27", {"threshold: expected a text, a number, true or false"}},
      {"prune = 'some'", {"some not in {none,prefill,always}"}},
      {"seed = -2", {"-2", "expected 0 or more"}},
      {"window = 3\nwindow = 4", {":2: "}},
      {"n_predict = 3\nn-predict = 4", {": the deck sets n-predict twice"}},
      {"temperature = 1\ntemp = 0", {": the deck sets temp twice"}},
      {"this is no TOML", {":1: "}},
      {"threshold = nan\nsurrogate = 'x'\nmodel = 'x'\nprompt = 'x'", {"--threshold is NaN"}}};
  for (BadDeck bad : decks) {
    folder.write("deck.toml", bad.text);
    SCOPED_TRACE(bad.text);
    // A value out of range is an option's, wherever it was given.
    if (bad.parts.front().rfind("--", 0) != 0) bad.parts.push_back(deck);
    expect_errors({"run"}, {{{"--config", deck}, bad.parts}});
  }
  const std::string none = folder.path() / "none.toml";
  expect_errors({"run"}, {{{"--config", none}, {none}}});
}

TEST(Deck, NumbersAsText) {
  const TemporaryFolder folder;
  const std::string deck = folder.path() / "deck.toml";
  for (const BadDeck& bad : std::vector<BadDeck>{{"window = ''", {"--window is ''"}},
                                                 {"seed = '-2'", {"--seed is -2"}},
                                                 {"temp = '1e999'", {"--temp is 1e999"}},
                                                 {"window = '0x10'", {"--window is 0x10"}}}) {
    folder.write("deck.toml", bad.text);
    expect_errors({"run", "-m", model_folder, "-p", "one"},
                  {{{"--config", deck}, {deck, bad.parts.front()}}});
  }
}

std::string repeated(const std::string& text, int count) {
  std::string all;
  for (int i = 0; i < count; ++i) all += text;
  return all;
}

TEST(Deck, OnlyFilesOfBoundedSizeAndDepth) {
  const TemporaryFolder folder;
  const std::string deck = folder.path() / "deck.toml";
  expect_errors({"run"}, {{{"--config", folder.path()}, {folder.path(), "is a folder"}},
                          {{"--config", "/dev/zero"}, {"/dev/zero", "neither a file"}},
                          {{"--config", "/dev/null"}, {"/dev/null", "neither a file"}}});
  constexpr int many = 40'000;
  const std::string dotted = "a" + repeated(".a", many - 1);
  for (const std::string& text :
       {"a = " + repeated("[", many) + repeated("]", many), "[" + dotted + "]\n", dotted + " = 1\n",
        "a = " + repeated("{ b = ", many) + "1" + repeated("}", many),
        "a = " + repeated("{ b.c = ", many) + "1" + repeated("}", many),
        "\"x\" . \".\"" + repeated(" . \".\"", many - 1) + " = 1\n"}) {
    folder.write("deck.toml", "# [[[\nprompt = '''[[[[[[[[[[[[[[[[[[[[[[[[[[[\n'''\n" + text);
    expect_errors({"run"}, {{{"--config", deck}, {deck + ":4: nested too deeply"}}});
  }
  folder.write("deck.toml", "question = [" + repeated("1,", 200'000) + "]");
  expect_errors({"run"}, {{{"--config", deck}, {deck, "at most 100000 values"}}});
  fs::resize_file(deck, 20 << 20);
  expect_errors({"run"}, {{{"--config", deck}, {deck, "too large"}}});
}

TEST(Files, OneFileByTwoNames) {
  const TemporaryFolder temporary;
  const fs::path root = temporary.path();
  const auto in = [&](const char* name) { return (root / name).string(); };
  temporary.write("x", "");
  fs::create_directory(root / "folder");
  fs::create_symlink("x", root / "soft");
  fs::create_symlink("new", root / "dangling");
  fs::create_symlink("dangling", root / "chain");
  fs::create_hard_link(root / "x", root / "hard");
  const std::vector<std::string> plain = {"run", "-m", model_folder, "-p", "one"};
  for (const auto& [one, other] :
       std::vector<std::pair<std::string, std::string>>{{in("x"), in("folder/../x")},
                                                        {in("x"), in("./x")},
                                                        {in("x"), in("soft")},
                                                        {in("x"), in("hard")},
                                                        {in("new"), in("chain")},
                                                        {in("no/../y"), in("y")}}) {
    expect_errors(plain,
                  {{{"--json", one, "--snapshot", other},
                    {"--json " + one + " and --snapshot " + other + " name the same file"}}});
  }
  expect_errors({"run", "-m", model_folder},
                {{{"-f", in("x"), "--dump", in("soft")}, {"--dump", "-f", "name the same file"}}});
  expect_errors({"train", "linear"},
                {{{in("x"), "-o", in("folder"), "--plot", in("x")}, {"both name the file"}}});
  expect_errors({"train", "linear", in("x")},
                {{{"-o", in("new"), "--json", in("new")}, {"both name the file"}}});
  std::vector<std::string> good = plain;
  good.insert(good.end(), {"--json", in("x"), "--dump", in("folder/x")});
  EXPECT_EQ(read(good).error, "");
}

TEST(Files, AreOutputsOrInputs) {
  // A new output would overwrite an input of the same name if is_output did not know it.
  const std::set<std::string> inputs = {
      "placement",    "file",  "questions",   "config",   "append",
      "resume",       "pairs", "tasks",       "haystack", "prompt-templates",
      "api-key-file", "qa",    "json-schema", "grammar"};
  const driver::CommandLine line;
  for (const CLI::App* command : line.app.get_subcommands({})) {
    for (const CLI::Option* option : command->get_options()) {
      const std::string type = option->get_type_name().substr(0, 4);
      if ((type != "FILE" && type != "DECK") || option->get_lnames().empty()) continue;
      const std::string& name = option->get_lnames().front();
      EXPECT_NE(driver::is_output(name), inputs.count(name) == 1)
          << "kvzap " << command->get_name() << " --" << name
          << ": expected in the outputs of arguments.cpp or in the inputs of this test";
    }
  }
}

TEST(Files, OfTheModelAreNotReplaced) {
  const TemporaryFolder temporary;
  const fs::path model = temporary.path() / "model";
  fs::copy(model_folder, model, fs::copy_options::recursive);
  for (const char* flag : {"--json", "--snapshot", "--dump"}) {
    const std::string file = model / ".." / "model" / "config.json";
    expect_errors({"run", "-m", model, "-p", "one"},
                  {{{flag, file}, {flag + (" " + file + " would replace a file of -m")}}});
  }
  temporary.write("model/run.json", "{}");
  EXPECT_EQ(read({"run", "-m", model, "-p", "one", "--json", model / "run.json"}).error, "");
}

}  // namespace
}  // namespace kvzap::test
