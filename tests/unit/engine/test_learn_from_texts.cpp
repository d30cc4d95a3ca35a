// Files of texts from which policies learn, and what calibrate makes of them.
#include <gtest/gtest.h>

#include <kvzap/engine/learn_from_texts.hpp>
#include <string>
#include <vector>

#include "source_dir.hpp"
#include "unit/temporary_folder.hpp"

namespace kvzap {
namespace {

const std::string model_folder = test::source_dir().string() + "/inputs/models/recall-4m";

class Texts : public ::testing::Test {
 protected:
  std::vector<std::vector<TokenId>> read(const std::string& content) const {
    m_folder.write("texts", content);
    return read_texts(m_folder.path() / "texts", &m_tokenizer, m_config, Communicator::self());
  }
  void refuse(const std::string& content, std::initializer_list<std::string_view> parts) const {
    test::expect_error([&] { read(content); }, parts);
  }

  test::TemporaryFolder m_folder;
  Tokenizer m_tokenizer = Tokenizer::load(model_folder);
  ModelConfig m_config = ModelConfig::load(model_folder);
};

TEST_F(Texts, OnePerLine) {
  const auto first = m_tokenizer.encode("one two", true);
  const auto second = m_tokenizer.encode(" three {\"text\": 4}", true);
  const std::vector<std::vector<TokenId>> both = {first, second};
  EXPECT_EQ(read("one two\n three {\"text\": 4}\n"), both);
  EXPECT_EQ(read("\n \t\none two\r\n\r\n three {\"text\": 4}"), both);
  EXPECT_EQ(read("one two"), std::vector<std::vector<TokenId>>{first});
}

TEST_F(Texts, JsonObjects) {
  const std::vector<std::vector<TokenId>> expected = {m_tokenizer.encode("one\ntwo", true),
                                                      m_tokenizer.encode("{3", true)};
  EXPECT_EQ(read("\n{\"text\": \"one\\ntwo\", \"n\": 1}\n  {\"text\": \"{3\"}\n"), expected);
  refuse("{\"text\": \"one\"}\ntwo\n", {"texts: line 2: not valid JSON", "as in the first line"});
  refuse("{\"text\": \"one\"}\n\n[1]\n", {"line 3: expected a JSON object, found array"});
  refuse("{\"txt\": \"one\"}", {"line 1: text: expected a string, found none"});
  refuse("{\"text\": 5}", {"line 1: text: expected a string, found 5"});
  refuse("{\"text\": \"\"}", {"line 1: the text has no tokens"});
}

TEST_F(Texts, IdsOfTheCallersMaking) {
  m_folder.write("texts", "one\ntwo\nthree\n");
  const auto length = [](const std::string& text) {
    return std::vector<TokenId>{static_cast<TokenId>(text.size())};
  };
  const auto read = [&](std::int64_t most) {
    return read_texts(m_folder.path() / "texts", length, m_config, Communicator::self(), most);
  };
  using Ids = std::vector<std::vector<TokenId>>;
  EXPECT_EQ(read(0), (Ids{{3}, {3}, {5}}));
  EXPECT_EQ(read(4), (Ids{{3}, {3}, {5}}));
  EXPECT_EQ(read(2), (Ids{{3}, {3}}));
  // What is after them is not read.
  m_folder.write("texts", "{\"text\": \"one\"}\nno JSON\n");
  EXPECT_EQ(read(1), (Ids{{3}}));
}

TEST_F(Texts, NoneAtAll) {
  refuse("", {"texts: there is no text in it"});
  refuse(" \n\n", {"there is no text in it"});
  const auto self = Communicator::self();
  m_folder.write("texts", "one");
  test::expect_error([&] { read_texts(m_folder.path() / "texts", nullptr, m_config, self); },
                     {"need the model's tokenizer"});
  test::expect_error([&] { read_texts(m_folder.path() / "none", &m_tokenizer, m_config, self); },
                     {"none: cannot be read"});
  test::expect_error([&] { read_texts(m_folder.path(), &m_tokenizer, m_config, self); },
                     {"cannot be read"});
  ModelConfig smaller = m_config;
  smaller.vocab_size = 1;
  test::expect_error([&] { read_texts(m_folder.path() / "texts", &m_tokenizer, smaller, self); },
                     {"line 1: token id", "not in the vocabulary"});
}

}  // namespace
}  // namespace kvzap
