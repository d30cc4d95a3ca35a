// The 13 tasks of RULER (Hsieh et al., arXiv 2404.06654), made to a length.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "eval/made_task.hpp"

namespace kvzap::detail {

/// Text that needles are hidden in, without end: it begins again behind its last word.
class Prose {
 public:
  /// That of made_up_prose, long enough for 131072 tokens of usual tokenizers.
  static Prose built_in();
  /// Throws Error, naming the file, if it cannot be read, is larger than 256 MiB, has no words or
  /// is no UTF-8 text.
  static Prose of_file(const std::filesystem::path& file);
  /// Any white space separates words. A word of more than 32 bytes (some languages write no spaces)
  /// is cut into several, which are joined without one.
  Prose(std::string_view text, std::string name);

  const std::string& name() const { return m_name; }
  bool has(std::string_view text) const { return m_text.find(text) != std::string::npos; }

  /// `words` words from the beginning of sentence `first` (modulo their number), with needles
  /// between sentences: needle i stands at the share depths[i] of them, ascending.
  std::string with_needles(std::uint64_t first, std::int64_t words,
                           const std::vector<std::string>& needles,
                           const std::vector<double>& depths) const;

 private:
  std::size_t pieces() const { return m_ends.size(); }

  std::string m_name;
  std::string m_text;  // words separated by single spaces
  // Of each word, or piece of one: its end in m_text, and whether a sentence ends with it. A
  // piece's space, if it has one, is its first byte.
  std::vector<std::size_t> m_ends;
  std::vector<char> m_ends_sentence;
  std::vector<std::size_t> m_sentences;  // first pieces
};

/// Questions about documents.
struct QuestionFile {
  struct Question {
    std::string text;
    std::vector<std::string> answers;
    std::vector<std::uint32_t> documents;  // that are needed
    std::optional<std::uint32_t> article;  // whose documents are related to those
  };
  std::string name;
  std::vector<std::string> documents;                // each once
  std::vector<std::vector<std::uint32_t>> articles;  // their documents, each once
  std::vector<Question> questions;
};

/// Reads SQuAD (1.1, 2.0: {"data": [{"paragraphs": [{"context", "qas"}]}]}; questions without an
/// answer are left out) or HotpotQA ([{"question", "answer", "context": [[title, [sentence]]]}])
/// JSON. Throws Error, naming file and field, for anything else, for files larger than 1 GiB and
/// where no question is left.
QuestionFile read_questions(const std::filesystem::path& file);

/// In the order of the paper.
const std::vector<std::string>& ruler_task_names();

/// Makes rows. The same for the same arguments, whatever was made before.
class Ruler {
 public:
  /// `questions`: for qa_1 and qa_2; may be fewer. The meter must outlive it.
  Ruler(const PromptMeter& meter, Prose prose, std::vector<QuestionFile> questions,
        std::uint64_t seed);

  bool can_make(const std::string& task) const;

  /// Row `index` of the task at the length. Throws TooShort.
  MadeTask make(const std::string& task, std::int64_t length, std::int64_t index);

  /// After `make`: how many rows ask each another question, if that is known to be limited.
  std::int64_t different_rows(const std::string& task, std::int64_t length) const;

 private:
  void fill(MadeTask& made, std::int64_t index);
  /// The one that row `index` asks.
  const QuestionFile::Question& question(const std::string& task, std::int64_t length,
                                         std::int64_t index);

  /// Of one qa task at one length: questions in random order, those of the first `tried` that fit.
  struct QuestionOrder {
    std::vector<std::uint32_t> order;
    std::vector<std::uint32_t> fitting;
    std::size_t tried = 0;
    std::int64_t least = 0;  // length that the shortest of those that did not fit would need
  };

  const PromptMeter& m_meter;
  Prose m_prose;
  std::vector<QuestionFile> m_questions;
  std::uint64_t m_seed;
  std::map<std::pair<std::string, std::int64_t>, QuestionOrder> m_orders;
};

}  // namespace kvzap::detail
