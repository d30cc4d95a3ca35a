#include "text/tokenizer_data.hpp"

#include <fmt/format.h>

#include <utility>

#include "files/byte_alphabet.hpp"

namespace kvzap {

using files::JsonField;

Tokenizer::Data::Data(nlohmann::json content, const std::string& name) : file(name) {
  // Returns a value moved out of an object's member; null if there is none.
  const auto taken = [](nlohmann::json& object, const char* key) {
    const auto found = object.is_object() ? object.find(key) : object.end();
    return found == object.end() ? nlohmann::json() : std::exchange(*found, nullptr);
  };
  nlohmann::json none;
  const auto model_member = content.find("model");
  nlohmann::json& model_content = model_member == content.end() ? none : *model_member;
  nlohmann::json vocab = taken(model_content, "vocab");
  nlohmann::json merges = taken(model_content, "merges");
  const JsonField root(content, file, "");
  model = text::read_model(root.member("model"), std::move(vocab), std::move(merges));
  size = model->size();
  normalizers.read(root.member("normalizer"));
  read_added_tokens(root.member("added_tokens"));
  pre_tokenizers.read(root.member("pre_tokenizer"), model->takes_bytes());
  added_ids = text::read_post_processor(root.member("post_processor"), [this](TokenId id) {
    return decoded_token(id, false).has_value();
  });
  decoder.read(root.member("decoder"));
  if (decoder.joins_bytes()) {
    token_bytes.fill(2 * size, [this](TokenId id) { return decoded_token(id, false); });
  }
}

std::string_view Tokenizer::Data::decoded_bytes(TokenId id, bool skip_special_tokens,
                                                std::string& memory) const {
  if (skip_special_tokens && may_be_added[filter_place(id)] && special.count(id) != 0) return {};
  if (token_bytes.has(id)) return token_bytes[id];
  memory.clear();
  if (const auto token = decoded_token(id, false)) files::byte_alphabet().decode(*token, memory);
  return memory;
}

void Tokenizer::Data::read_added_tokens(const JsonField& field) {
  if (field.is_null()) return;
  for (std::size_t i = 0; i < field.array_size(); ++i) {
    const JsonField entry = field.element(i);
    const std::string& content = entry.member("content").string();
    const JsonField id_field = entry.member("id");
    const text::AddedToken token{id_field.token_id(), entry.member("single_word").boolean(false),
                                 entry.member("lstrip").boolean(false),
                                 entry.member("rstrip").boolean(false)};
    const bool is_special = entry.member("special").boolean(false);
    const bool normalized = entry.member("normalized").boolean(!is_special);
    if (content.empty()) entry.member("content").fail("a text that is not empty");

    const auto in_model = model->find(content);
    if (in_model) {
      if (*in_model != token.id) {
        id_field.fail(fmt::format("{}, the id in model.vocab", *in_model));
      }
    } else if (decoded_token(token.id, false)) {
      id_field.fail("an id that no other token has");
    } else {
      ++size;
    }
    if (!added.emplace(content, token.id).second) {
      entry.member("content").fail("a token that is not listed before");
    }
    const std::string pattern = normalized ? normalizers.apply(content, entry.where()) : content;
    if (pattern.empty()) {
      entry.member("content").fail("a text that is not empty after normalization");
    }
    if (!(normalized ? normalized_matcher : raw_matcher).insert(pattern, token)) {
      entry.member("content").fail("a token that normalizes like no other");
    }
    added_texts[token.id] = pattern;
    may_be_added.set(filter_place(token.id));
    if (is_special) special.insert(token.id);
  }
}

}  // namespace kvzap
