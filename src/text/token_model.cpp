#include "text/token_model.hpp"

#include <fmt/format.h>

#include <utility>

#include "text/bpe.hpp"
#include "text/unigram.hpp"
#include "text/word_models.hpp"

namespace kvzap::text {

std::unique_ptr<const TokenModel> read_model(const files::JsonField& model, nlohmann::json vocab,
                                             nlohmann::json merges) {
  const files::JsonField type = model.member("type");
  // Files of old releases omit the type. Only Unigram has a list of scores.
  const std::string name = type.is_null() ? (vocab.is_array() ? "Unigram" : "BPE") : type.string();
  if (name == "BPE") return std::make_unique<Bpe>(model, vocab, std::move(merges));
  if (name == "Unigram") return std::make_unique<Unigram>(model, std::move(vocab));
  if (name == "WordPiece") return std::make_unique<WordPiece>(model, vocab);
  if (name == "WordLevel") return std::make_unique<WordLevel>(model, vocab);
  type.fail("BPE, Unigram, WordPiece or WordLevel");
}

std::string byte_token(unsigned char byte) { return fmt::format("<0x{:02X}>", byte); }

}  // namespace kvzap::text
