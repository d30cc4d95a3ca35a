#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <unordered_map>
#include <unordered_set>

#include "eval/ruler.hpp"
#include "files/json_field.hpp"
#include "files/json_file.hpp"
#include "text/utf8.hpp"

namespace kvzap::eval {
namespace {

using Json = nlohmann::json;

Json read_question_json(const std::filesystem::path& file) {
  constexpr std::uintmax_t max_bytes = std::uintmax_t{1} << 30;
  const std::string what = file.string();
  std::error_code status;
  if (!std::filesystem::is_regular_file(file, status)) {
    throw Error(fmt::format("{}: cannot be read; expected a file of questions", what));
  }
  return files::parse_json(files::read_text_file(file, max_bytes), what);
}

bool is_blank(std::string_view text) {
  return text.find_first_not_of(" \t\r\n\v\f") == std::string_view::npos;
}

const std::string& text_of(const files::JsonField& field) {
  const std::string& text = field.string();
  if (is_blank(text)) field.fail("a text");
  return text;
}

class Documents {
 public:
  explicit Documents(QuestionFile& file) : m_file(file) {}
  std::uint32_t index_of(const std::string& text) {
    const auto [found, is_new] = m_indices.try_emplace(text, m_file.documents.size());
    if (is_new) m_file.documents.push_back(text);
    return found->second;
  }

 private:
  QuestionFile& m_file;
  std::unordered_map<std::string, std::uint32_t> m_indices;
};

/// Returns the distinct answers. Omits answers without a word, which almost any answer would
/// contain.
std::vector<std::string> squad_answers(const files::JsonField& list) {
  std::vector<std::string> answers;
  std::unordered_set<std::string_view> seen;
  const std::size_t count = list.array_size();
  for (std::size_t i = 0; i < count; ++i) {
    const std::string& text = list.element(i).member("text").string();
    if (!is_blank(text) && seen.insert(text).second) answers.push_back(text);
  }
  return answers;
}

void add_squad_article(const files::JsonField& article, Documents& documents, QuestionFile& file) {
  const files::JsonField paragraphs = article.member("paragraphs");
  const std::size_t count = paragraphs.array_size();
  std::vector<std::uint32_t> of_article;
  for (std::size_t i = 0; i < count; ++i) {
    of_article.push_back(documents.index_of(text_of(paragraphs.element(i).member("context"))));
  }
  const auto number = static_cast<std::uint32_t>(file.articles.size());
  for (std::size_t i = 0; i < count; ++i) {
    const files::JsonField list = paragraphs.element(i).member("qas");
    for (std::size_t j = 0; j < list.array_size(); ++j) {
      const files::JsonField entry = list.element(j);
      if (entry.member("is_impossible").boolean(false)) continue;
      QuestionFile::Question question;
      question.text = text_of(entry.member("question"));
      question.answers = squad_answers(entry.member("answers"));
      question.documents = {of_article[i]};
      if (question.answers.empty()) continue;
      question.article = number;
      file.questions.push_back(std::move(question));
    }
  }
  // Stored once for all questions of the article. A copy for each question would take memory that
  // grows with the square of an article's paragraphs, and whole collections are written as one
  // article.
  std::sort(of_article.begin(), of_article.end());
  of_article.erase(std::unique(of_article.begin(), of_article.end()), of_article.end());
  file.articles.push_back(std::move(of_article));
}

void add_hotpot_question(const files::JsonField& entry, Documents& documents, QuestionFile& file) {
  QuestionFile::Question question;
  question.text = text_of(entry.member("question"));
  question.answers = {text_of(entry.member("answer"))};
  const files::JsonField context = entry.member("context");
  std::unordered_set<std::uint32_t> seen;
  for (std::size_t i = 0; i < context.array_size(); ++i) {
    const files::JsonField pair = context.element(i);
    if (pair.array_size() != 2) pair.fail("a title and a list of sentences");
    std::string text = pair.element(0).string() + "\n";
    const files::JsonField sentences = pair.element(1);
    for (std::size_t j = 0; j < sentences.array_size(); ++j) text += sentences.element(j).string();
    const std::uint32_t index = documents.index_of(text);
    if (seen.insert(index).second) question.documents.push_back(index);
  }
  if (question.documents.empty()) context.fail("at least one document");
  file.questions.push_back(std::move(question));
}

}  // namespace

QuestionFile read_questions(const std::filesystem::path& file) {
  const Json json = read_question_json(file);
  QuestionFile result;
  result.name = file.filename().string();
  Documents documents(result);
  const files::JsonField root(json, file.string(), "");
  if (json.is_object()) {
    const files::JsonField articles = root.member("data");
    for (std::size_t i = 0; i < articles.array_size(); ++i) {
      add_squad_article(articles.element(i), documents, result);
    }
  } else if (json.is_array()) {
    for (std::size_t i = 0; i < json.size(); ++i) {
      add_hotpot_question({json[i], file.string(), fmt::format("[{}]", i)}, documents, result);
    }
  } else {
    root.fail("an object with \"data\" (SQuAD) or an array of questions (HotpotQA)");
  }
  if (result.questions.empty()) {
    throw Error(fmt::format("{}: expected questions with answers, found none", file.string()));
  }
  return result;
}

}  // namespace kvzap::eval
