// The post-processors of tokenizer.json: they add ids before and after those of a text.
#pragma once

#include <functional>
#include <kvzap/core/types.hpp>
#include <vector>

#include "files/json_field.hpp"

namespace kvzap::text {

struct AddedIds {
  std::vector<TokenId> prefix, suffix;
};

/// Reads the field post_processor. `is_token`: whether an id has a token.
AddedIds read_post_processor(const files::JsonField& field,
                             const std::function<bool(TokenId)>& is_token);

}  // namespace kvzap::text
