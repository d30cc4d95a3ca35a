// --help of every command, and the lists of `kvzap policies`.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "commands/support/policies_command.hpp"
#include "unit/driver/command_lines.hpp"
#include "unit/policy/policy_names.hpp"

namespace kvzap::test {
namespace {

std::string help(std::vector<std::string> arguments, const char* columns = nullptr) {
  columns ? setenv("COLUMNS", columns, 1) : unsetenv("COLUMNS");
  const Outcome outcome = read(arguments);
  unsetenv("COLUMNS");
  EXPECT_EQ(outcome.status, 0);
  EXPECT_EQ(outcome.error, "");
  return outcome.out;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

std::size_t longest_line(const std::string& text) {
  std::size_t longest = 0;
  for (const std::string& line : lines_of(text)) longest = std::max(longest, line.size());
  return longest;
}

bool has(const std::string& text, const std::string& pattern) {
  return std::regex_search(text,
                           std::regex(pattern, std::regex::ECMAScript | std::regex::multiline));
}

TEST(Help, FitsItsColumns) {
  const driver::CommandLine line;
  std::vector<std::vector<std::string>> commands = {{"--help"}};
  for (const CLI::App* command : line.app.get_subcommands({})) {
    commands.push_back({command->get_name(), "--help"});
  }
  EXPECT_GE(commands.size(), 14u);
  for (const auto& command : commands) {
    SCOPED_TRACE(command.front());
    const std::string text = help(command);
    for (const std::string& shown : lines_of(text)) {
      EXPECT_LE(shown.size(), 80u) << shown;
      EXPECT_TRUE(shown.empty() || shown.back() != ' ') << shown;
    }
    // Words of CLI11 that no reader needs.
    EXPECT_FALSE(has(text, R"(\{false\}|\{\w+,|\bUINT\b|REQUIRED|\[default|TEXT:|:INT|)"
                           R"((INT|FLOAT|SEED|bf16)=)"));
  }
  const std::pair<const char*, std::size_t> widths[] = {
      {"40", 60}, {"60", 60}, {"100", 100}, {"300", 120}, {"wide", 80}};
  for (const auto& [asked, columns] : widths) {
    const std::size_t longest = longest_line(help({"run", "--help"}, asked));
    EXPECT_LE(longest, columns);
    EXPECT_GT(longest, columns - 8);
  }
}

TEST(Help, HasEveryOption) {
  const driver::CommandLine line;
  std::set<std::string> declared;
  for (const CLI::Option* option : line.app.get_subcommand("run")->get_options()) {
    for (const std::string& name : option->get_lnames()) declared.insert("--" + name);
    for (const std::string& name : option->get_snames()) declared.insert("-" + name);
  }
  EXPECT_GT(declared.size(), 25u);
  for (const char* flag : {"--help", "-h"}) {
    const std::string text = help({"run", flag});
    std::set<std::string> shown;
    const std::regex flags(R"((^|[^\w-])(--?[a-z][a-z-]*))");
    for (std::sregex_iterator i(text.begin(), text.end(), flags), end; i != end; ++i) {
      shown.insert((*i)[2].str());
    }
    shown.erase("-inf");
    EXPECT_EQ(shown, declared);
  }
}

TEST(Help, ListsCommands) {
  for (const char* flag : {"--help", "-h"}) {
    const std::string text = help({flag});
    for (const char* command : {"run", "bench", "policies"}) {
      EXPECT_TRUE(has(text, std::string("^  ") + command + "  ")) << command;
    }
    EXPECT_TRUE(has(text, "--version"));
  }
}

TEST(Help, TellsDefaults) {
  const std::string text = std::regex_replace(help({"run", "--help"}), std::regex(R"(\s+)"), " ");
  const std::pair<const char*, const char*> defaults[] = {{"dtype f32|bf16|f16", "bf16"},
                                                          {"window TOKENS", "128"},
                                                          {"sink INT", "0"},
                                                          {"prefill dense|sparse", "dense"},
                                                          {"chunk INT", "2048"},
                                                          {"n-predict INT", "128"},
                                                          {"temp FLOAT", "0"},
                                                          {"read-pages PAGES", "all"},
                                                          {"page-rows INT", "64"}};
  for (const auto& [flag, value] : defaults) {
    const std::size_t begin = text.find(std::string("--") + flag + " ");
    ASSERT_NE(begin, std::string::npos) << flag;
    const std::string entry = text.substr(begin, text.find(" --", begin + 2) - begin);
    EXPECT_NE(entry.find(std::string("default: ") + value), std::string::npos) << entry;
  }
}

TEST(PoliciesCommand, ListsNames) {
  const std::string text = driver::policies_text("");
  for (const std::string& name : test::policy_names()) {
    EXPECT_TRUE(has(text, "^  " + name + " ")) << name;
  }
  for (const char* name : {"ada", "pyramid", "global", "per-layer", "per-head", "critical", "chunk",
                           "chunkkv", "kvcrush", "dms", "merge", "cam", "rerotate", "fit"}) {
    EXPECT_TRUE(has(text, std::string("^  \\+") + name + " ")) << name;
  }
  EXPECT_TRUE(has(text, "arXiv 2404.14469"));
  for (const std::string& line : lines_of(text)) EXPECT_TRUE(line.empty() || line.back() != ' ');
}

TEST(PoliciesCommand, DescribesOne) {
  const std::string text = driver::policies_text("snapkv");
  EXPECT_EQ(text.rfind("snapkv\n", 0), 0u);
  for (const char* part :
       {"paper ", "score ", "needs ", "cost ", "budget ", "decode ", "window=", "whole number"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part;
  }
  EXPECT_EQ(driver::policies_text("ada").rfind("+ada\n", 0), 0u);
  EXPECT_EQ(driver::policies_text("+ada"), driver::policies_text("ada"));
  const auto whole = driver::policies_json("");
  const auto& listed = whole.at("policies");
  const auto found = std::find_if(listed.begin(), listed.end(),
                                  [](const auto& one) { return one.at("name") == "snapkv"; });
  ASSERT_NE(found, listed.end());
  EXPECT_EQ(driver::policies_json("snapkv"), *found);
}

TEST(PoliciesCommand, RefusesUnknownNames) {
  expect_errors({"policies"},
                {{{"snpkv"}, {"'snpkv' is not a policy or modifier", "did you mean snapkv?"}},
                 {{"zzzzzzzzzzz"}, {"kvzap policies lists them"}}});
}

}  // namespace
}  // namespace kvzap::test
