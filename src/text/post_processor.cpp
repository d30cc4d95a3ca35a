#include "text/post_processor.hpp"

#include <cstddef>
#include <string>

#include "text/json_parts.hpp"

namespace kvzap::text {
namespace {

using files::JsonField;
using IsToken = std::function<bool(TokenId)>;

TokenId existing_id(const JsonField& field, const IsToken& is_token) {
  const TokenId id = field.token_id();
  if (!is_token(id)) field.fail("the id of a token");
  return id;
}

AddedIds read_template_processing(const JsonField& field, const IsToken& is_token) {
  const JsonField single = field.member("single");
  const JsonField special_tokens = field.member("special_tokens");
  AddedIds added;
  bool text_seen = false;
  for (std::size_t i = 0; i < single.array_size(); ++i) {
    const JsonField piece = single.element(i);
    const JsonField sequence = piece.member("Sequence");
    if (!sequence.is_null()) {
      if (sequence.member("id").string() != "A" || text_seen) {
        single.fail("the sequence A once");
      }
      text_seen = true;
      continue;
    }
    const std::string& name = piece.member("SpecialToken").member("id").string();
    const JsonField ids = special_tokens.member(name).member("ids");
    for (std::size_t k = 0; k < ids.array_size(); ++k) {
      (text_seen ? added.suffix : added.prefix).push_back(existing_id(ids.element(k), is_token));
    }
  }
  if (!text_seen) single.fail("the sequence A once");
  return added;
}

// The id of a pair of a token and its id.
TokenId id_of_pair(const JsonField& field, const IsToken& is_token) {
  if (field.array_size() != 2) field.fail("a token and its id");
  return existing_id(field.element(1), is_token);
}

AddedIds read_added_ids(const JsonField& field, const IsToken& is_token) {
  const JsonField type = field.member("type");
  const std::string& name = type.string();
  if (name == "TemplateProcessing") return read_template_processing(field, is_token);
  if (name == "BertProcessing" || name == "RobertaProcessing") {
    return {{id_of_pair(field.member("cls"), is_token)},
            {id_of_pair(field.member("sep"), is_token)}};
  }
  type.fail(
      "ByteLevel, TemplateProcessing, BertProcessing, RobertaProcessing or a Sequence of these");
}

}  // namespace

AddedIds read_post_processor(const JsonField& field, const IsToken& is_token) {
  AddedIds result;
  bool adds_ids = false;
  for (const JsonField& part : flattened(field, "processors")) {
    const JsonField type = part.member("type");
    if (type.string() == "ByteLevel") continue;  // changes offsets alone
    // A second one would treat the added ids as texts of their own.
    if (adds_ids) type.fail("ByteLevel beside the one post-processor that adds ids");
    adds_ids = true;
    result = read_added_ids(part, is_token);
  }
  return result;
}

}  // namespace kvzap::text
