#include "session/prompt.hpp"

#include <fmt/format.h>

namespace kvzap::detail {

void check_ids(const std::vector<TokenId>& ids, const ModelConfig& config,
               const std::string& source) {
  for (const TokenId id : ids) {
    if (id >= 0 && id < config.vocab_size) continue;
    throw Error(fmt::format("{}: token id {} is not in the vocabulary; expected less than {}",
                            source, id, config.vocab_size));
  }
}

}  // namespace kvzap::detail
