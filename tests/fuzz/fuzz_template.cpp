// Chat templates. An input is chat_template.jinja; what comes after a NUL is
// tokenizer_config.json. Inputs that begin with `{"` are tokenizer_config.json alone.
#include <algorithm>
#include <kvzap/model/chat_template.hpp>

#include "harness.hpp"
#include "json_mutator.hpp"

namespace kvzap::fuzz {

// The folder of the inputs: the file may be either of the two.
const std::initializer_list<std::string_view> named_in_messages = {"kvzap-fuzz-"};

void run_one(std::string_view input) {
  static InputFile source, config;
  static const InputFolder with_template, without;
  static const bool linked = [] {
    with_template.link("chat_template.jinja", source);
    with_template.link("tokenizer_config.json", config);
    without.link("tokenizer_config.json", config);
    return true;
  }();
  static_cast<void>(linked);
  const bool has_template = input.substr(0, 2) != "{\"";
  if (has_template) {
    const std::size_t end = std::min(input.find('\0'), input.size());
    source.assign(input.substr(0, end));
    config.assign(end < input.size() ? input.substr(end + 1) : R"({"bos_token": "<s>"})");
  } else {
    config.assign(input);
  }
  const auto chat = ChatTemplate::detect(has_template ? with_template.path() : without.path());
  for (const bool thinking : {false, true}) {
    const ChatTemplate::Parts parts = chat.parts(thinking);
    const std::string prompt = parts.prompt(" A question.\n");
    require(prompt.size() >= parts.prefix.size() + parts.suffix.size() + 11, "the message is lost");
    require(prompt.compare(0, parts.prefix.size(), parts.prefix) == 0, "the prefix is lost");
    require(parts.context("x").compare(0, parts.prefix.size(), parts.prefix) == 0,
            "a context begins otherwise than its prompt");
  }
  const auto exchange = chat.exchange("one", "two");
  require(exchange.text.compare(exchange.user, 3, "one") == 0 &&
              exchange.text.compare(exchange.assistant, 3, "two") == 0,
          "messages are not where they are said to be");
}

}  // namespace kvzap::fuzz

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size,
                                               std::size_t max_size, unsigned seed) {
  const bool is_json = size > 2 && data[0] == '{' && data[1] == '"';
  return is_json ? kvzap::fuzz::mutate_json_input(data, size, max_size, seed)
                 : LLVMFuzzerMutate(data, size, max_size);
}
