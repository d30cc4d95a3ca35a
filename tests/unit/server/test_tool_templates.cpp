// Prompts of chats with tools, as transformers renders them.
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "files/json_file.hpp"
#include "files/parsed_json.hpp"
#include "server/answer_parts.hpp"
#include "source_dir.hpp"
#include "unit/server/served_model.hpp"

namespace kvzap::server {
namespace {

using OrderedJson = nlohmann::ordered_json;

const std::map<std::string, ToolStyle> styles = {
    {"hermes", ToolStyle::hermes},     {"coder", ToolStyle::coder},
    {"glm", ToolStyle::glm},           {"mistral", ToolStyle::mistral},
    {"deepseek", ToolStyle::deepseek}, {"kimi", ToolStyle::kimi},
    {"lfm", ToolStyle::lfm},           {"granite", ToolStyle::granite},
    {"harmony", ToolStyle::harmony},   {"json", ToolStyle::json}};

// tests/golden/make_tool_goldens.py records them.
TEST(ToolTemplates, PromptsAreThoseOfTransformers) {
  const auto file = test::source_dir() / "tests/golden/jinja/tools.json";
  const OrderedJson golden = files::parse_ordered_json(files::read_text_file(file), file.string());
  ASSERT_EQ(golden.at("templates").size(), styles.size());
  ServedModel model = test::served();
  for (const auto& [style, source] : golden.at("templates").items()) {
    const test::TemporaryFolder folder;
    folder.write("chat_template.jinja", source.get<std::string>());
    folder.write("tokenizer_config.json", R"({"bos_token": "<s>", "eos_token": "</s>"})");
    model.chat_template = ChatTemplate::detect(folder.path());
    EXPECT_EQ(format_of(source.get<std::string>()).style, styles.at(style));
    for (const auto& [name, chat] : golden.at("chats").items()) {
      SCOPED_TRACE(style + ", " + name);
      const OrderedJson& prompt = golden.at("prompts").at(style).at(name);
      const auto rendered = [&, &body = chat] {
        const ApiRequest request = parse_request(body.dump(), Endpoint::chat, model);
        return test::text_of(request.generations.front().prompt, model);
      };
      if (prompt.is_null()) {
        EXPECT_THROW(rendered(), BadRequest);
      } else {
        EXPECT_EQ(rendered(), prompt.get<std::string>());
      }
    }
  }
}

}  // namespace
}  // namespace kvzap::server
