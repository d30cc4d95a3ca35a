// The 13 tasks of RULER (Hsieh et al., arXiv 2404.06654), at any length.
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

namespace kvzap::eval {

/// A filler text that hides needles. After its last word it starts again.
class Prose {
 public:
  /// Returns made_up_prose, long enough for 131,072 tokens of common tokenizers.
  static Prose built_in();
  /// Reads a file. Throws Error, naming the file, if it cannot be read, is larger than 256 MiB, has
  /// no words or is not UTF-8.
  static Prose of_file(const std::filesystem::path& file);
  /// Any white space separates words. A word of more than 32 bytes (some languages write no spaces)
  /// becomes several pieces, which are joined without a space.
  Prose(std::string_view text, std::string name);

  const std::string& name() const { return m_name; }
  bool has(std::string_view text) const { return m_text.find(text) != std::string::npos; }

  /// Returns `words` words from the beginning of sentence `first` (modulo their number), with
  /// needles between sentences. Needle i comes after the fraction depths[i] of the sentences;
  /// depths must ascend.
  std::string with_needles(std::uint64_t first, std::int64_t words,
                           const std::vector<std::string>& needles,
                           const std::vector<double>& depths) const;

 private:
  std::size_t pieces() const { return m_ends.size(); }

  std::string m_name;
  std::string m_text;  // words separated by single spaces
  // For each word, or piece of one: its end in m_text, and whether it ends a sentence. The first
  // byte of a piece is its space, if it has one.
  std::vector<std::size_t> m_ends;
  std::vector<char> m_ends_sentence;
  std::vector<std::size_t> m_sentences;  // first pieces
};

/// Questions about documents.
struct QuestionFile {
  struct Question {
    std::string text;
    std::vector<std::string> answers;
    std::vector<std::uint32_t> documents;  // with the answer
    std::optional<std::uint32_t> article;  // of related documents
  };
  std::string name;
  std::vector<std::string> documents;  // distinct texts
  // the documents of each article, without duplicates
  std::vector<std::vector<std::uint32_t>> articles;
  std::vector<Question> questions;
};

/// Reads SQuAD (1.1, 2.0: {"data": [{"paragraphs": [{"context", "qas"}]}]}; questions without an
/// answer are left out) or HotpotQA ([{"question", "answer", "context": [[title, [sentence]]]}])
/// JSON. Throws Error, naming file and field, for any other content, for files larger than 1 GiB,
/// and if no question is left.
QuestionFile read_questions(const std::filesystem::path& file);

/// Returns the names of the tasks, in the order of the paper.
const std::vector<std::string>& ruler_task_names();

/// Makes rows. A row depends only on the arguments, not on earlier rows.
class Ruler {
 public:
  /// `questions`: the files for qa_1 and qa_2; they may be missing. The meter must outlive the
  /// maker.
  Ruler(const PromptMeter& meter, Prose prose, std::vector<QuestionFile> questions,
        std::uint64_t seed);

  bool can_make(const std::string& task) const;

  /// Makes row `index` of the task at the length. Throws TooShort.
  MadeTask make(const std::string& task, std::int64_t length, std::int64_t index);

  /// Returns, after `make`, the number of rows with different questions, if it is known to be
  /// limited.
  std::int64_t different_rows(const std::string& task, std::int64_t length) const;

 private:
  void fill(MadeTask& made, std::int64_t index);
  /// Returns the question of row `index`.
  const QuestionFile::Question& question(const std::string& task, std::int64_t length,
                                         std::int64_t index);

  /// One qa task at one length: questions in random order, and those of the first `tried` that fit.
  struct QuestionOrder {
    std::vector<std::uint32_t> order;
    std::vector<std::uint32_t> fitting;
    std::size_t tried = 0;
    std::int64_t least = 0;  // length of the shortest question that did not fit
  };

  const PromptMeter& m_meter;
  Prose m_prose;
  std::vector<QuestionFile> m_questions;
  std::uint64_t m_seed;
  std::map<std::pair<std::string, std::int64_t>, QuestionOrder> m_orders;
};

}  // namespace kvzap::eval
