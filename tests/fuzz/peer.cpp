// What kvzap makes of chat templates and tokenizers, for the differential tests: one JSON object a
// line in, one out. {"template", "message", "thinking"} gives {"prompt"}; {"template", "variables"}
// gives {"text"}. {"tokenizer", "texts",
// "decode": lists of ids} gives {"ids", "special_ids", "texts": pairs without and with special
// tokens}; "folder" in place of "tokenizer" names a folder that has one. What is refused gives
// {"error"}, and a text that cannot be encoded a message as its ids. {"schema", "options",
// "samples", "seed", "documents"} gives {"texts": random ones of the schema's grammar, "taken":
// whether each document is one, "seconds": of processor time to compile it}.
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <kvzap/model/chat_template.hpp>
#include <kvzap/model/tokenizer.hpp>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "grammar/automaton.hpp"
#include "grammar/json_schema.hpp"
#include "grammar/recogniser.hpp"
#include "jinja/template.hpp"

namespace {

using Json = nlohmann::json;
namespace fs = std::filesystem;

void write(const fs::path& file, const std::string& content) {
  std::ofstream stream(file, std::ios::binary | std::ios::trunc);
  stream << content;
  if (!stream.flush()) throw std::runtime_error(file.string() + ": cannot be written");
}

Json ids_or_error(const kvzap::Tokenizer& tokenizer, const Json& text, bool add_special_tokens) {
  try {
    return tokenizer.encode(text.get<std::string>(), add_special_tokens);
  } catch (const kvzap::Error& error) {
    return error.what();
  }
}

std::string decoded(const kvzap::Tokenizer& tokenizer, const std::vector<kvzap::TokenId>& ids,
                    bool skip_special_tokens) {
  std::string text = tokenizer.decode(ids, skip_special_tokens), streamed;
  kvzap::Tokenizer::StreamDecoder decoder(tokenizer, skip_special_tokens);
  for (const kvzap::TokenId id : ids) streamed += decoder.append(id);
  streamed += decoder.finish();
  return streamed == text ? text : "a stream of tokens gives another text: " + streamed;
}

/// Renders a template with variables whose order of keys counts.
Json rendered(const std::string& line) {
  const auto request = nlohmann::ordered_json::parse(line);
  const kvzap::jinja::Template source(request["template"].get<std::string>(), "template");
  return {{"text", source.render(request["variables"])}};
}

Json answer(const fs::path& folder, const Json& request) {
  if (request.contains("template")) {
    write(folder / "chat_template.jinja", request["template"].get<std::string>());
    write(folder / "tokenizer_config.json", R"({"bos_token": "<s>", "eos_token": "</s>"})");
    const auto chat = kvzap::ChatTemplate::detect(folder);
    const auto parts = chat.parts(request["thinking"].get<bool>());
    return {{"prompt", parts.prompt(request["message"].get<std::string>())}};
  }
  if (!request.contains("folder")) {
    write(folder / "tokenizer.json", request["tokenizer"].get<std::string>());
  }
  const auto tokenizer =
      kvzap::Tokenizer::load(request.contains("folder") ? fs::path(request["folder"]) : folder);
  Json result = {{"ids", Json::array()}, {"special_ids", Json::array()}, {"texts", Json::array()}};
  for (const auto& text : request["texts"]) {
    result["ids"].push_back(ids_or_error(tokenizer, text, false));
    result["special_ids"].push_back(ids_or_error(tokenizer, text, true));
  }
  for (const auto& list : request["decode"]) {
    const auto ids = list.get<std::vector<kvzap::TokenId>>();
    result["texts"].push_back({decoded(tokenizer, ids, true), decoded(tokenizer, ids, false)});
  }
  return result;
}

/// A random text of the grammar; brackets and strings are closed sooner than by chance. Empty if it
/// gets too long.
std::string random_text(const kvzap::grammar::Automaton& automaton, std::mt19937& random) {
  constexpr std::size_t long_text = 300, longest_text = 4'000;
  kvzap::grammar::Recogniser recogniser(automaton);
  std::string text;
  while (text.size() < longest_text) {
    std::string next, closing;
    for (unsigned byte = 0; byte < 256; ++byte) {
      if (!recogniser.read_byte(static_cast<unsigned char>(byte))) continue;
      recogniser.go_back(1);
      next += static_cast<char>(byte);
      if (byte == '}' || byte == ']' || byte == '"') closing += static_cast<char>(byte);
    }
    if (next.empty() || (recogniser.is_match() && random() % 4 == 0)) break;
    const bool closes = !closing.empty() && random() % (text.size() > long_text ? 2 : 8) == 0;
    const std::string& from = closes ? closing : next;
    text += from[random() % from.size()];
    recogniser.read_byte(static_cast<unsigned char>(text.back()));
  }
  return recogniser.is_match() ? text : "";
}

bool is_taken(const kvzap::grammar::Automaton& automaton, const std::string& text) {
  kvzap::grammar::Recogniser recogniser(automaton);
  for (const char c : text) {
    if (!recogniser.read_byte(static_cast<unsigned char>(c))) return false;
  }
  return recogniser.is_match();
}

/// Reads the request again, because the order of keys counts.
Json schema_texts(const std::string& line) {
  const auto request = nlohmann::ordered_json::parse(line);
  const std::clock_t start = std::clock();
  kvzap::grammar::JsonSchemaOptions options;
  options.closed_objects = request.value("closed", false);
  const auto automaton =
      kvzap::grammar::compile(kvzap::grammar::read_json_schema(request["schema"], options));
  const double seconds = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
  Json result = {{"texts", Json::array()}, {"taken", Json::array()}, {"seconds", seconds}};
  std::mt19937 random(request.value("seed", 1U));
  for (int i = 0; i < request.value("samples", 0); ++i) {
    const std::string text = random_text(automaton, random);
    if (!text.empty()) result["texts"].push_back(text);
  }
  for (const auto& text : request.value("documents", nlohmann::ordered_json::array())) {
    result["taken"].push_back(is_taken(automaton, text.get<std::string>()));
  }
  return result;
}

}  // namespace

int main() {
  std::string pattern = (fs::temp_directory_path() / "kvzap-peer-XXXXXX").string();
  if (::mkdtemp(pattern.data()) == nullptr) return 1;
  for (std::string line; std::getline(std::cin, line);) {
    Json result;
    try {
      const Json request = Json::parse(line);
      result = request.contains("schema")      ? schema_texts(line)
               : request.contains("variables") ? rendered(line)
                                               : answer(pattern, request);
    } catch (const kvzap::Error& error) {
      result = {{"error", error.what()}};
    }
    std::cout << result.dump(-1, ' ', true, Json::error_handler_t::replace) << std::endl;
  }
  fs::remove_all(pattern);
  return 0;
}
