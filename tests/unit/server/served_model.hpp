// The demo model as a server has it.
#pragma once

#include <filesystem>
#include <kvzap/server/protocol.hpp>
#include <string>
#include <vector>

#include "source_dir.hpp"
#include "unit/temporary_folder.hpp"

namespace kvzap::test {

using namespace kvzap::server;

inline ServedModel served() {
  const std::filesystem::path folder = test::source_dir() / "inputs/models/recall-4m";
  ServedModel model;
  model.name = "recall";
  model.tokenizer = Tokenizer::load(folder);
  model.chat_template = ChatTemplate::detect(folder);
  model.stop_ids = {1, 2};
  model.vocabulary = 1024;
  model.max_tokens = 4096;
  model.grammars = answer_grammars(*model.tokenizer, model.vocabulary, {});
  model.pruning_of = [](const PruneWish& wish) {
    Pruning pruning = Pruning::kvzap("surrogate");
    pruning.mode = wish.prune.value_or(PruneMode::prefill);
    pruning.amount.threshold = wish.threshold;
    pruning.amount.keep_tokens = wish.keep_tokens;
    pruning.amount.kv_bytes = wish.kv_bytes;
    pruning.policy = wish.policy.value_or("");
    pruning.decode = wish.decode;
    if (wish.evict_ratio) throw BadRequest("kvzap.evict_ratio", "there is no budget");
    return pruning;
  };
  model.page_format_of = [](const PruneWish& wish) {
    return page_format_from_name(wish.kv_type.value_or("bf16"), DType::bf16);
  };
  return model;
}

inline std::string text_of(const std::vector<Segment>& segments, const ServedModel& model) {
  std::string text;
  for (const Segment& segment : segments) text += model.tokenizer->decode(segment.tokens, false);
  return text;
}

/// The model with the chat template of a family with tools and thoughts.
inline ServedModel served_with_tools() {
  const TemporaryFolder folder;
  folder.write(
      "chat_template.jinja",
      "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}"
      "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
      "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} "
      "{{ c.function.arguments | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
      "{% if add_generation_prompt %}<|im_start|>assistant\n"
      "{% if enable_thinking %}<think>\n{% endif %}{% endif %}");
  folder.write("tokenizer_config.json", "{}");
  ServedModel model = served();
  model.chat_template = ChatTemplate::detect(folder.path());
  return model;
}

}  // namespace kvzap::test
