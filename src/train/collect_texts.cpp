#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <kvzap/lab/collect.hpp>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>

#include "files/fnv.hpp"
#include "files/json_field.hpp"
#include "files/line_reader.hpp"
#include "text/utf8.hpp"

namespace kvzap {
namespace {

constexpr const char* repeat_request = "\n\nRepeat the previous context exactly.";

// White space as Python's str.strip() defines it, which includes information separators.
bool is_python_space(std::int32_t c) { return (c >= 0x1c && c <= 0x1f) || text::is_white_space(c); }

std::string_view stripped(std::string_view text) {
  while (!text.empty()) {
    const auto [character, bytes] = text::first_character(text);
    if (!is_python_space(character)) break;
    text.remove_prefix(bytes);
  }
  while (!text.empty()) {
    const auto [character, bytes] = text::last_character(text);
    if (!is_python_space(character)) break;
    text.remove_suffix(bytes);
  }
  return text;
}

struct Line {
  std::string text;
  std::string subset;
};

Line parse_line(const files::LineReader& reader) {
  const nlohmann::json json = reader.object("expected an object with a field \"text\"");
  const files::JsonField row(json, reader.where());
  const files::JsonField subset = row.member("subset");
  Line result{row.member("text").string(), subset.is_null() ? "" : subset.string()};
  if (result.subset.find('\0') != std::string::npos) subset.fail("a string without NUL");
  return result;
}

// SplitMix64 (Steele, Lea, Flood 2014).
std::uint64_t next_random(std::uint64_t& state) {
  std::uint64_t z = (state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// Returns `count` of the numbers 0 … total - 1, ascending: the beginning of a permutation that
// depends on seed and line.
std::vector<std::int64_t> sample(std::int64_t total, std::int64_t count, std::uint64_t seed,
                                 std::int64_t line) {
  std::vector<std::int64_t> all(static_cast<std::size_t>(total));
  std::iota(all.begin(), all.end(), std::int64_t{0});
  if (count >= total) return all;
  std::uint64_t state = seed;
  state = next_random(state) ^ static_cast<std::uint64_t>(line);
  for (std::int64_t i = 0; i < count; ++i) {
    // The bias of the remainder is below 2^-40 for texts of up to 2^24 tokens.
    const auto left = static_cast<std::uint64_t>(total - i);
    std::swap(all[i], all[i + static_cast<std::int64_t>(next_random(state) % left)]);
  }
  all.resize(static_cast<std::size_t>(count));
  std::sort(all.begin(), all.end());
  return all;
}

// How the text of one line of the file becomes a conversation to collect from.
struct TextForm {
  /// Returns the tokens that the token limits count.
  std::function<std::vector<TokenId>(const std::string& text)> encode;
  /// Returns the conversation without CollectText::positions.
  std::function<CollectText(const std::vector<TokenId>& ids)> make;
  const char* how_often = "";  // how often the text occurs, for a message
};

CollectTexts read_as(const std::filesystem::path& file, const CollectRules& rules,
                     const TextForm& form, const ModelConfig& config) {
  files::LineReader reader(file, "a file of texts");
  CollectTexts result;
  std::map<std::string, std::int64_t> of_subset;
  while (reader.next_text()) {
    const std::string where = reader.where();
    const Line parsed = parse_line(reader);
    ++result.lines;
    if (rules.max_texts > 0 && static_cast<std::int64_t>(result.texts.size()) == rules.max_texts) {
      ++result.over_max_texts;
      continue;
    }
    const std::vector<TokenId> ids = form.encode(parsed.text);
    const auto tokens = static_cast<std::int64_t>(ids.size());
    if (tokens < rules.min_tokens || tokens == 0) {
      ++result.too_short;
      continue;
    }
    if (tokens > rules.max_tokens) {
      ++result.too_long;
      continue;
    }
    if (!parsed.subset.empty() && of_subset[parsed.subset] == rules.per_subset) {
      ++result.over_subset;
      continue;
    }
    CollectText made;
    try {
      made = form.make(ids);
    } catch (const Error& error) {
      throw Error(fmt::format("{}: {}", where, error.what()));
    }
    if (static_cast<std::int64_t>(made.ids.size()) > config.longest_context()) {
      ++result.too_long;
      continue;
    }
    for (const TokenId id : made.ids) {
      if (id >= config.vocab_size) {
        throw Error(fmt::format("{}: token id {} is not in the vocabulary; expected less than {}",
                                where, id, config.vocab_size));
      }
    }
    ++of_subset[parsed.subset];
    made.positions =
        sample(made.text_end - made.text_begin, rules.tokens_per_text, rules.seed, reader.number());
    result.plan.push_back(
        {reader.number(), parsed.subset, made.text_end - made.text_begin, made.positions});
    result.texts.push_back(std::move(made));
  }
  if (result.lines == 0) {
    throw Error(
        fmt::format("{}: there is no text in it; expected a JSON object per line", file.string()));
  }
  if (result.texts.empty()) {
    throw Error(
        fmt::format("{}: none of its texts can be used: fewer than {} tokens (--min-tokens): {}; "
                    "more than {} (--max-tokens), or too many for the model's {} positions{}: {}",
                    file.string(), rules.min_tokens, result.too_short, rules.max_tokens,
                    config.longest_context(), form.how_often, result.too_long));
  }
  // A missing newline at the end of the file makes no difference.
  result.hash =
      fmt::format("{:016x}", reader.has_end() ? reader.hash() : files::fnv1a("\n", reader.hash()));
  return result;
}

}  // namespace

CollectText make_collect_text(std::string_view text, const Tokenizer& tokenizer,
                              const ChatTemplate& chat_template) {
  const auto exchange = chat_template.exchange(std::string(text) + repeat_request, text);
  CollectText result;
  result.ids = tokenizer.encode(exchange.text);
  const std::size_t boundaries[] = {exchange.user, exchange.user + text.size(), exchange.assistant,
                                    exchange.assistant + text.size()};
  std::int64_t* const targets[] = {&result.text_begin, &result.text_end, &result.repeat_begin,
                                   &result.repeat_end};
  // A token begins after the complete characters of the tokens before it.
  Tokenizer::StreamDecoder decoder(tokenizer, false);
  std::size_t begin = 0, next = 0;
  std::string whole;
  for (std::size_t i = 0; i < result.ids.size(); ++i) {
    begin = whole.size();
    while (next < std::size(boundaries) && begin >= boundaries[next]) {
      *targets[next++] = static_cast<std::int64_t>(i);
    }
    whole += decoder.append(result.ids[i]);
  }
  whole += decoder.finish();
  if (whole != exchange.text || next != std::size(boundaries)) {
    throw Error("the tokenizer does not reproduce the text, so its tokens have no place in it");
  }
  return result;
}

CollectTexts read_collect_texts(const std::filesystem::path& file, const CollectRules& rules,
                                const Tokenizer& tokenizer, const ChatTemplate& chat_template,
                                const ModelConfig& config) {
  TextForm form;
  form.encode = [&](const std::string& text) { return tokenizer.encode(stripped(text)); };
  form.make = [&](const std::vector<TokenId>& ids) {
    // The normalized text, which is the text that the tokens spell.
    return make_collect_text(tokenizer.decode(ids, false), tokenizer, chat_template);
  };
  form.how_often = " twice";
  return read_as(file, rules, form, config);
}

CollectTexts read_plain_texts(const std::filesystem::path& file, const CollectRules& rules,
                              const Tokenizer& tokenizer, const ModelConfig& config) {
  TextForm form;
  form.encode = [&](const std::string& text) { return tokenizer.encode(text, true); };
  form.make = [](const std::vector<TokenId>& ids) {
    CollectText text;
    text.ids = ids;
    text.text_end = static_cast<std::int64_t>(ids.size());
    return text;
  };
  form.how_often = "";
  CollectRules no_sample = rules;
  no_sample.tokens_per_text = 0;
  return read_as(file, no_sample, form, config);
}

}  // namespace kvzap
