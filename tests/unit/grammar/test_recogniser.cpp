// The recogniser beside a reference, and masks of tokens beside the recogniser.
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "grammar/automaton.hpp"
#include "grammar/recogniser.hpp"
#include "grammar/token_masks.hpp"
#include "grammar/token_trie.hpp"
#include "unit/grammar/random_grammar.hpp"
#include "unit/grammar/reference_match.hpp"

namespace kvzap::grammar {
namespace {

std::vector<std::string> texts_up_to(std::size_t length) {
  std::vector<std::string> texts = {""};
  for (std::size_t i = 0; i < texts.size(); ++i) {
    if (texts[i].size() == length) break;
    for (const char c : {'a', 'b', 'c'}) texts.push_back(texts[i] + c);
  }
  return texts;
}

/// Nothing if no text matches, or if long repeats within `both` make it too large.
std::optional<Automaton> compiled(const Grammar& grammar) {
  try {
    return compile(grammar);
  } catch (const Error& error) {
    const std::string what = error.what();
    EXPECT_TRUE(what == "no text matches the grammar" || what.find("is too large") != what.npos);
    return std::nullopt;
  }
}

bool read(Recogniser& recogniser, const std::string& text) {
  return std::all_of(text.begin(), text.end(),
                     [&](char c) { return recogniser.read_byte(static_cast<unsigned char>(c)); });
}

TEST(Recogniser, KnowsTheTextsOfAGrammarAndTheirBeginnings) {
  constexpr std::size_t longest = 5;
  const std::vector<std::string> texts = texts_up_to(longest);
  int compared = 0;
  for (unsigned seed = 0; seed < 300; ++seed) {
    const Grammar grammar = RandomGrammar(seed).grammar(1 + static_cast<int>(seed % 4));
    const std::optional<Automaton> automaton = compiled(grammar);
    std::set<std::string> beginnings;
    for (const std::string& text : texts) {
      const bool expected = test::ReferenceMatch::matches(grammar, text);
      if (!automaton) break;
      Recogniser recogniser(*automaton);
      const bool is_read = read(recogniser, text);
      ASSERT_EQ(is_read && recogniser.is_match(), expected) << seed << " '" << text << "'";
      if (is_read) beginnings.insert(text);
      if (!expected) continue;
      ++compared;
      for (std::size_t length = 0; length < text.size(); ++length) {
        ASSERT_TRUE(beginnings.count(text.substr(0, length))) << seed << ' ' << text;
      }
    }
  }
  EXPECT_GT(compared, 1000);
}

TEST(Recogniser, EachStateCanReachAnEnd) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    const std::optional<Automaton> automaton = compiled(RandomGrammar(seed).grammar(3));
    if (!automaton) continue;
    RandomGrammar random(seed + 1000);
    Recogniser recogniser(*automaton);
    for (int step = 0; step < 8; ++step) {
      recogniser.read_byte(static_cast<unsigned char>('a' + random.below(3)));
    }
    constexpr std::size_t most_ways = 200;
    // The shortest way out, by breadth.
    std::vector<std::string> ways = {""};
    bool has_end = false;
    for (std::size_t i = 0; i < ways.size() && i < most_ways && !has_end; ++i) {
      Recogniser copy = recogniser;
      ASSERT_TRUE(read(copy, ways[i]));
      has_end = copy.is_match();
      for (const char c : {'a', 'b', 'c'}) {
        if (!copy.read_byte(static_cast<unsigned char>(c))) continue;
        ways.push_back(ways[i] + c);
        copy.go_back(1);
      }
    }
    EXPECT_TRUE(has_end || ways.size() >= most_ways) << seed;
  }
}

TEST(Recogniser, RightRecursionKeepsFewItems) {
  ByteSet letters;
  for (char c = 'a'; c <= 'z'; ++c) letters.set(static_cast<unsigned char>(c));
  Grammar grammar;
  const RuleId root = grammar.add("root");
  grammar.rules[0].body = choice({sequence({one_byte(letters), call(root)}), one_byte(letters)});
  const Automaton automaton = compile(grammar);
  Recogniser recogniser(automaton);
  for (int i = 0; i < 3000; ++i) {
    ASSERT_TRUE(recogniser.read_byte(static_cast<unsigned char>('a' + i % 26)));
    ASSERT_TRUE(recogniser.is_match());
  }
  EXPECT_LT(recogniser.end() - recogniser.begin(), 4);
  EXPECT_LT(recogniser.work(), 20'000'000U);
}

/// `count` rules of one letter, and as many that call each of them.
Grammar grammar_with_many_callers(int count) {
  Grammar grammar;
  const RuleId root = grammar.add("root");
  std::vector<Expr> letters, callers;
  for (int i = 0; i < count; ++i) letters.push_back(call(grammar.add("letter", literal("x"))));
  for (int i = 0; i < count; ++i) callers.push_back(call(grammar.add("any", choice(letters))));
  grammar.rules[static_cast<std::size_t>(root)].body = repeat(choice(callers), 1);
  return grammar;
}

TEST(Recogniser, BoundsTheWorkOfAByte) {
  const Automaton few = compile(grammar_with_many_callers(20));
  Recogniser easy(few);
  EXPECT_TRUE(read(easy, "xxxx"));
  const Automaton many = compile(grammar_with_many_callers(300));
  Recogniser hard(many);
  const auto expect_refused = [](const auto& work) {
    try {
      work();
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("ambiguous"), std::string::npos) << error.what();
    }
  };
  expect_refused([&] { hard.read_byte('x'); });
  EXPECT_LT(hard.work(), 3'000'000U);
  // So are the tokens that may follow, whose masks are made in the same step.
  const TokenTrie trie(texts_up_to(4));
  const TokenMasks masks(many, trie);
  Recogniser begins(many);
  std::vector<std::uint64_t> bits((texts_up_to(4).size() + 63) / 64, 0);
  for (int i = 0; i < 200; ++i) masks.allow(begins, bits);  // no text of the trie has an x
  EXPECT_LT(begins.work(), 60'000'000U);
}

TEST(TokenMasks, AllowTheTokensWhoseBytesMayFollow) {
  std::vector<std::string> vocabulary = texts_up_to(4);
  vocabulary.push_back("ab");  // twice
  vocabulary.push_back("abcabcabcabc");
  vocabulary.push_back("d");
  const TokenTrie trie(vocabulary);
  int allowed = 0, forbidden = 0, too_ambiguous = 0;
  for (unsigned seed = 0; seed < 150; ++seed) {
    RandomGrammar random(seed);
    const std::optional<Automaton> automaton =
        compiled(random.grammar(1 + static_cast<int>(seed % 4)));
    if (!automaton) continue;
    const TokenMasks masks(*automaton, trie);
    Recogniser recogniser(*automaton);
    for (int step = 0; step < 8; ++step) {
      std::vector<std::uint64_t> bits((vocabulary.size() + 63) / 64, 0);
      try {
        masks.allow(recogniser, bits);
      } catch (const Error&) {
        ++too_ambiguous;
        break;
      }
      std::vector<std::size_t> following;
      for (std::size_t token = 0; token < vocabulary.size(); ++token) {
        Recogniser copy = recogniser;
        const bool expected = !vocabulary[token].empty() && read(copy, vocabulary[token]);
        const bool found = ((bits[token / 64] >> (token % 64)) & 1) != 0;
        ASSERT_EQ(found, expected) << seed << " step " << step << " '" << vocabulary[token] << "'";
        ++(expected ? allowed : forbidden);
        if (expected) following.push_back(token);
      }
      if (following.empty()) break;
      const int drawn = random.below(static_cast<int>(following.size()));
      read(recogniser, vocabulary[following[static_cast<std::size_t>(drawn)]]);
    }
  }
  EXPECT_GT(allowed, 1000);
  EXPECT_GT(forbidden, 2000);
  EXPECT_LT(too_ambiguous, 3);
}

}  // namespace
}  // namespace kvzap::grammar
