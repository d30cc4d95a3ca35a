#include "http/request_log.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <ctime>
#include <nlohmann/json.hpp>
#include <random>
#include <string_view>

#include "files/decimal.hpp"
#include "files/json_file.hpp"
#include "files/quote.hpp"

namespace kvzap::driver {
namespace {

using OrderedJson = nlohmann::ordered_json;

std::string time_text() {
  return fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)));
}

std::string shown(const std::string& text) {
  constexpr std::size_t longest = 200;
  return text.empty() ? std::string("-") : files::shown(text, longest);
}

OrderedJson head_of_line(const Request& request) {
  return {{"time", time_text()}, {"client", request.client}, {"request_id", shown(request.id)}};
}

std::string facts_text(const AnswerFacts& facts) {
  std::string text = fmt::format(" request {}", facts.request);
  if (facts.tokens) {
    text += fmt::format(" prompt {} cached {} new {} evicted {:.3f} first {:.3f} s",
                        facts.tokens->prompt, facts.tokens->cached, facts.tokens->generated,
                        facts.evict_ratio, facts.first_seconds);
  }
  return text + fmt::format(" total {:.3f} s", facts.total_seconds);
}

double rounded(double value) {
  files::read_real(fmt::format("{:.6g}", value), value);
  return value;
}

void add_facts(OrderedJson& line, const AnswerFacts& facts) {
  line["request"] = facts.request;
  if (facts.tokens) {
    line["prompt_tokens"] = facts.tokens->prompt;
    line["cached_tokens"] = facts.tokens->cached;
    line["new_tokens"] = facts.tokens->generated;
    line["evict_ratio"] = rounded(facts.evict_ratio);
    line["first_seconds"] = rounded(facts.first_seconds);
  }
  line["total_seconds"] = rounded(facts.total_seconds);
}

}  // namespace

std::string log_line(const Request& request, int status, const std::string& note,
                     const AnswerFacts* facts, bool as_json) {
  if (!as_json) {
    return fmt::format("{} {} {} {} {} {}{}{}{}\n", time_text(), request.client, shown(request.id),
                       shown(request.method), shown(request.path), status,
                       facts ? facts_text(*facts) : "", note.empty() ? "" : " ", note);
  }
  OrderedJson line = head_of_line(request);
  line["method"] = shown(request.method);
  line["path"] = shown(request.path);
  line["status"] = status;
  if (facts) add_facts(line, *facts);
  if (!note.empty()) line["message"] = note;
  return files::json_text(line) + "\n";
}

std::string prompt_line(const Request& request, const std::string& body, bool as_json) {
  if (!as_json) {
    return fmt::format("{} {} prompt {}\n", time_text(), shown(request.id),
                       files::shown(body, body.size()));
  }
  OrderedJson line = head_of_line(request);
  line["prompt"] = body;
  return files::json_text(line) + "\n";
}

std::string request_id(const std::string& given) {
  constexpr std::size_t longest = 128;
  constexpr std::string_view others = "-_.:+/=";
  const auto is_plain = [&](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
           others.find(c) != std::string_view::npos;
  };
  if (!given.empty() && given.size() <= longest &&
      std::all_of(given.begin(), given.end(), is_plain)) {
    return given;
  }
  static thread_local std::mt19937_64 draw{std::random_device{}()};
  return fmt::format("{:016x}{:016x}", draw(), draw());
}

}  // namespace kvzap::driver
