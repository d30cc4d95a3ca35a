// tokenizer.json. `"$BYTES":0` in an input stands for the 256 tokens of the byte alphabet, ids 0 to
// 255, which every vocabulary needs: mutations then meet what differs between files. What comes
// after a NUL is a text to tokenize.
#include <kvzap/model/tokenizer.hpp>

#include "files/byte_alphabet.hpp"
#include "harness.hpp"
#include "json_mutator.hpp"
#include "text/utf8.hpp"

namespace kvzap::fuzz {

const std::initializer_list<std::string_view> named_in_messages = {};

namespace {

std::string byte_vocabulary() {
  std::string text;
  for (int byte = 0; byte < 256; ++byte) {
    const std::string& token = kvzap::files::byte_alphabet().of_byte[byte];
    if (byte > 0) text += ',';
    text += token == "\"" || token == "\\" ? "\"\\" + token : "\"" + token;
    text += "\":" + std::to_string(byte);
  }
  return text;
}

std::string expanded(std::string_view input) {
  static const std::string vocabulary = byte_vocabulary();
  constexpr std::string_view mark = "\"$BYTES\":0";
  std::string text;
  std::size_t begin = 0;
  const std::size_t at = input.find(mark);
  if (at != input.npos) {  // once: the memory that a file may take is counted by the input's bytes
    text = std::string(input.substr(0, at)) + vocabulary;
    begin = at + mark.size();
  }
  return text += input.substr(begin);
}

}  // namespace

void run_one(std::string_view input) {
  static InputFile file;
  static const InputFolder folder;
  static const bool linked = [] {
    folder.link("tokenizer.json", file);
    return true;
  }();
  static_cast<void>(linked);
  const std::size_t end = std::min(input.find('\0'), input.size());
  file.assign(expanded(input.substr(0, end)));
  const Tokenizer tokenizer = Tokenizer::load(folder.path());
  // (A text may take more memory than a file, for each of its bytes.)
  const std::string_view further = input.substr(std::min(end + 1, input.size())).substr(0, 10000);
  for (const std::string_view text : {std::string_view("It's 12 ab\u0301c  \n<s> ab"), further}) {
    const auto ids = tokenizer.encode(text, true);
    for (const TokenId id : ids) tokenizer.is_special(id);
    for (const bool skip : {false, true}) {
      const std::string whole = tokenizer.decode(ids, skip);
      require(text::is_valid_utf8(whole), "decoded text is not UTF-8");
      Tokenizer::StreamDecoder decoder(tokenizer, skip);
      std::string streamed;
      for (const TokenId id : ids) streamed += decoder.append(id);
      require(streamed + decoder.finish() == whole, "a stream of tokens gives another text");
    }
  }
}

}  // namespace kvzap::fuzz

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size,
                                               std::size_t max_size, unsigned seed) {
  return kvzap::fuzz::mutate_json_input(data, size, max_size, seed);
}
