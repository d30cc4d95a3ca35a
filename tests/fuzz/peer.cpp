// What kvzap makes of chat templates and tokenizers, for the differential tests: one JSON object a
// line in, one out. {"template", "message", "thinking"} gives {"prompt"}; {"tokenizer", "texts"}
// gives {"ids", "special_ids", "texts"}; what is refused gives {"error"}.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <kvzap/model/chat_template.hpp>
#include <kvzap/model/tokenizer.hpp>
#include <nlohmann/json.hpp>
#include <string>

namespace {

using Json = nlohmann::json;
namespace fs = std::filesystem;

void write(const fs::path& file, const std::string& content) {
  std::ofstream stream(file, std::ios::binary | std::ios::trunc);
  stream << content;
  if (!stream.flush()) throw std::runtime_error(file.string() + ": cannot be written");
}

Json answer(const fs::path& folder, const Json& request) {
  if (request.contains("template")) {
    write(folder / "chat_template.jinja", request["template"].get<std::string>());
    write(folder / "tokenizer_config.json", R"({"bos_token": "<s>", "eos_token": "</s>"})");
    const auto chat = kvzap::ChatTemplate::detect(folder);
    const auto parts = chat.parts(request["thinking"].get<bool>());
    return {{"prompt", parts.prompt(request["message"].get<std::string>())}};
  }
  write(folder / "tokenizer.json", request["tokenizer"].get<std::string>());
  const auto tokenizer = kvzap::Tokenizer::load(folder);
  Json result = {{"ids", Json::array()}, {"special_ids", Json::array()}, {"texts", Json::array()}};
  for (const auto& text : request["texts"]) {
    const auto ids = tokenizer.encode(text.get<std::string>());
    result["ids"].push_back(ids);
    result["special_ids"].push_back(tokenizer.encode(text.get<std::string>(), true));
    result["texts"].push_back(tokenizer.decode(ids));
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
      result = answer(pattern, Json::parse(line));
    } catch (const kvzap::Error& error) {
      result = {{"error", error.what()}};
    }
    std::cout << result.dump(-1, ' ', true, Json::error_handler_t::replace) << std::endl;
  }
  fs::remove_all(pattern);
  return 0;
}
