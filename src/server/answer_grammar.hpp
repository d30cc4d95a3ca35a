// What a request wants its answers to be, as a grammar.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <kvzap/model/token_grammar.hpp>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "server/answer_parts.hpp"
#include "server/request_fields.hpp"

namespace kvzap::server {

/// Grammars by what they were made of. Compiling takes up to a second, and clients send the same
/// schema again and again. All members may be called from several threads at once.
class AnswerGrammars {
 public:
  using Vocabulary = std::shared_ptr<const TokenGrammar::Vocabulary>;

  explicit AnswerGrammars(std::function<Vocabulary()> make_vocabulary)
      : m_make_vocabulary(std::move(make_vocabulary)) {}

  /// Returns the grammar of `key` if it is kept. Throws what making it threw.
  std::shared_ptr<const TokenGrammar> find(const std::string& key);
  /// Returns the grammar of `key`, made by `make` if it is not kept. Throws Error if the grammars
  /// of requests in progress take too much memory, and what `make` throws, also when it is asked
  /// again.
  std::shared_ptr<const TokenGrammar> get(
      const std::string& key,
      const std::function<std::shared_ptr<const TokenGrammar>(const Vocabulary&)>& make);

 private:
  struct Entry {
    std::string key;
    std::shared_ptr<const TokenGrammar> grammar;  // null: it was refused
    std::string failure;
  };
  using Entries = std::list<Entry>;

  std::shared_ptr<const TokenGrammar> find_locked(const std::string& key);
  void keep(Entry entry);

  std::function<Vocabulary()> m_make_vocabulary;
  std::mutex m_mutex;
  Vocabulary m_vocabulary;
  std::list<Entry> m_entries;                              // the last used first
  std::vector<std::weak_ptr<const TokenGrammar>> m_alive;  // these and those of requests
};

/// The grammar of answers.
struct AnswerGrammar {
  /// Null: answers are any text, or `make` is left to be called.
  std::shared_ptr<const TokenGrammar> grammar;
  /// Null: nothing is left to do. Throws BadRequest.
  std::function<std::shared_ptr<const TokenGrammar>()> make;
};

/// Returns the grammar of the answers to a request, which may have to be made yet. Reads
/// response_format, OpenAI's; guided_json, guided_regex, guided_choice, guided_grammar and
/// structured_outputs, vLLM's; json_schema and grammar, llama-server's; and, with tools in
/// `format`, tool_choice. Throws BadRequest.
AnswerGrammar answer_grammar(const Json& body, const AnswerFormat& format,
                             const ServedModel& model);

}  // namespace kvzap::server
