// Time of masks by grammars in a step of many sequences, beside the same draws without a grammar.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <kvzap/engine/sampler.hpp>
#include <kvzap/model/token_grammar.hpp>
#include <kvzap/model/tokenizer.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "files/byte_alphabet.hpp"

namespace kvzap::perf {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* usage =
    "Usage: grammar_masks [TOKENS [SEQUENCES [STEPS]]]\n"
    "Draws answers of JSON schemas from random logits of a vocabulary of TOKENS (default: 152000)\n"
    "for SEQUENCES (16) at once, and prints the time of masks for each step.\n";

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Tokens as byte-level vocabularies have them: bytes, words with and without a space, numbers,
/// marks of code, and characters of three bytes.
std::vector<std::string> vocabulary(std::size_t size) {
  std::vector<std::string> tokens;
  std::set<std::string> known;
  const auto add = [&](const std::string& text) {
    if (tokens.size() < size && known.insert(text).second) tokens.push_back(text);
  };
  for (int byte = 0; byte < 256; ++byte) add(std::string(1, static_cast<char>(byte)));
  for (int number = 0; number < 1000; ++number) add(std::to_string(number));
  const std::string marks[] = {"\"",  "\":",  "\": ", "\",",  "\"}", "{\"",  "[",
                               "]",   "}",    "},",   "\\n",  "\"]", "\"],", "://",
                               "();", ", \"", " \"",  "\n\n", "  ",  "    "};
  for (const std::string& a : marks) {
    add(a);
    for (const std::string& b : marks) add(a + b);
  }
  std::mt19937 random(1);
  while (tokens.size() < size) {
    std::string word;
    if (random() % 6 == 0) {
      for (unsigned count = 1 + random() % 3; count > 0; --count) {
        const unsigned code = 0x4E00 + random() % 0x4000;
        word += static_cast<char>(0xE0 | (code >> 12));
        word += static_cast<char>(0x80 | ((code >> 6) & 63));
        word += static_cast<char>(0x80 | (code & 63));
      }
    } else {
      for (unsigned count = 2 + random() % 8; count > 0; --count) {
        word += static_cast<char>('a' + random() % 26);
      }
      if (random() % 4 == 0) word.front() = static_cast<char>(word.front() - 'a' + 'A');
      if (random() % 20 == 0) word += marks[random() % std::size(marks)];
    }
    add((random() % 2 == 0 ? " " : "") + word);
  }
  return tokens;
}

/// A tokenizer of these tokens, through a file as models have one.
Tokenizer tokenizer_of(const std::vector<std::string>& tokens) {
  nlohmann::json words;
  const files::ByteAlphabet& alphabet = files::byte_alphabet();
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    words[alphabet.encode(tokens[i])] = i;
  }
  const auto folder = std::filesystem::temp_directory_path() / "kvzap-grammar-masks";
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "tokenizer.json")
      << nlohmann::json{{"version", "1.0"},
                        {"added_tokens", nlohmann::json::array()},
                        {"normalizer", nullptr},
                        {"pre_tokenizer", nullptr},
                        {"post_processor", nullptr},
                        {"decoder", {{"type", "ByteLevel"}}},
                        {"model", {{"type", "WordLevel"}, {"vocab", words}, {"unk_token", "a"}}}}
             .dump();
  Tokenizer tokenizer = Tokenizer::load(folder);
  std::filesystem::remove_all(folder);
  return tokenizer;
}

struct Case {
  const char* name;
  const char* schema;
};

constexpr Case cases[] = {
    {"flat object",
     R"({"type": "object", "properties": {"name": {"type": "string"}, "city": {"type": "string"},
         "age": {"type": "integer"}}, "required": ["name", "city", "age"]})"},
    {"limits and enums",
     R"({"type": "object", "properties": {"id": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
         "text": {"type": "string", "maxLength": 200}, "kind": {"enum": ["one", "two", "three"]},
         "when": {"type": "string", "format": "date-time"},
         "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 50}},
         "required": ["id", "text", "kind", "when", "tags"], "additionalProperties": false})"},
    {"recursive tree",
     R"({"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {
         "label": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
         "required": ["label", "children"], "additionalProperties": false}}})"},
    {"any object", R"({"type": "object"})"}};

void run(const Case& one, std::shared_ptr<const TokenGrammar::Vocabulary> words, std::size_t tokens,
         int sequences, int steps) {
  auto start = Clock::now();
  const auto grammar = TokenGrammar::from_json_schema(std::move(words), one.schema);
  const double compile = seconds_since(start);
  std::vector<TokenGrammar::State> states(static_cast<std::size_t>(sequences),
                                          TokenGrammar::State(grammar));
  SamplingOptions free;
  free.temperature = 1;
  free.top_k = 40;
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> logits(tokens);
  for (float& logit : logits) logit = normal(random);
  std::vector<double> times;
  double append_seconds = 0;
  for (int step = 0; step < steps; ++step) {
    std::rotate(logits.begin(), logits.begin() + 1 + step % 97, logits.end());
    double seconds = 0;
    for (TokenGrammar::State& state : states) {
      start = Clock::now();
      const auto& allowed = state.allowed();
      seconds += seconds_since(start);
      TokenId best = -1;
      for (std::size_t i = 0; i < tokens; ++i) {
        if (((allowed[i / 64] >> (i % 64)) & 1) == 0) continue;
        if (best < 0 || logits[i] > logits[static_cast<std::size_t>(best)]) {
          best = static_cast<TokenId>(i);
        }
      }
      start = Clock::now();
      if (best < 0) {
        state = TokenGrammar::State(grammar);
      } else {
        state.append(best);
      }
      append_seconds += seconds_since(start);
      std::rotate(logits.begin(), logits.begin() + 13, logits.end());
    }
    times.push_back(seconds);
  }
  double sum = 0;
  for (const double time : times) sum += time;
  const std::size_t half = times.size() / 2;
  double later = 0;
  for (std::size_t i = half; i < times.size(); ++i) later += times[i];
  std::vector<double> sorted(times.begin() + static_cast<std::ptrdiff_t>(half), times.end());
  std::sort(sorted.begin(), sorted.end());
  fmt::print(
      "{:<18} compile {:7.2f} ms; masks of {} sequences, ms a step: mean {:6.2f}, second "
      "half {:6.2f} (median {:.2f}, largest {:.2f}); appending {:.3f}\n",
      one.name, 1e3 * compile, sequences, 1e3 * sum / steps,
      1e3 * later / static_cast<double>(times.size() - half), 1e3 * sorted[sorted.size() / 2],
      1e3 * sorted.back(), 1e3 * append_seconds / steps);
}

int run_all(int count, char** arguments) {
  const auto number = [&](int place, long otherwise) {
    return count > place ? std::stol(arguments[place]) : otherwise;
  };
  const auto size = static_cast<std::size_t>(number(1, 152'000));
  const int sequences = static_cast<int>(number(2, 16)), steps = static_cast<int>(number(3, 200));
  const Tokenizer tokenizer = tokenizer_of(vocabulary(size));
  auto start = Clock::now();
  const auto words = TokenGrammar::vocabulary_of(tokenizer, static_cast<std::int64_t>(size), {});
  fmt::print("vocabulary of {} tokens: {:.0f} ms, once\n", size, 1e3 * seconds_since(start));
  // The rest of a draw from logits.
  std::vector<float> logits(size, 0.5F);
  SamplingOptions sampling;
  sampling.temperature = 1;
  Sampler sampler(sampling);
  start = Clock::now();
  for (int i = 0; i < 16; ++i) sampler(logits);
  fmt::print("draws of {} sequences without a grammar: {:.2f} ms\n", sequences,
             1e3 * seconds_since(start) * sequences / 16);
  for (const Case& one : cases) run(one, words, size, sequences, steps);
  return 0;
}

}  // namespace
}  // namespace kvzap::perf

int main(int count, char** arguments) {
  try {
    if (count > 1 && arguments[1][0] == '-') {
      fmt::print("{}", kvzap::perf::usage);
      return 0;
    }
    return kvzap::perf::run_all(count, arguments);
  } catch (const std::exception& error) {
    fmt::print(stderr, "grammar_masks: {}\n{}", error.what(), kvzap::perf::usage);
    return 1;
  }
}
