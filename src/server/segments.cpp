#include "server/segments.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

namespace kvzap::server {
namespace {

std::string message_mark(std::size_t message) {
  return fmt::format("\x01kvzap-message-{}\x01", message);
}

std::string stripped(const std::string& text) {
  constexpr const char* blanks = " \t\n\r\f\v";
  const std::size_t first = text.find_first_not_of(blanks);
  const std::size_t last = text.find_last_not_of(blanks);
  return first == std::string::npos ? "" : text.substr(first, last + 1 - first);
}

/// Splits one conversation, message by message.
class Splitter {
 public:
  Splitter(const std::vector<ChatMessage>& messages,
           const std::vector<std::vector<std::string>>& parts, const std::string& begun_answer,
           bool thinking, const ServedModel& model)
      : m_messages(messages),
        m_parts(parts),
        m_tokenizer(*model.tokenizer),
        m_whole(model.chat_template->render(messages, thinking, true) + begun_answer) {
    // Marks in place of the contents show the template's own text between the messages.
    std::vector<ChatMessage> marked = messages;
    for (std::size_t i = 0; i < marked.size(); ++i) marked[i].content = message_mark(i);
    m_glue = model.chat_template->render(marked, thinking, true) + begun_answer;
  }

  std::vector<Segment> operator()() {
    bool fits = true;
    for (std::size_t i = 0; fits && i < m_messages.size(); ++i) fits = add(i);
    // If the template drops or changes messages, the conversation is a single context.
    if (!fits || m_segments.empty() || m_all != m_whole) {
      return {{Segment::Kind::context, m_tokenizer.encode(m_whole), {}, true}};
    }
    add_cut();
    return std::move(m_segments);
  }

 private:
  /// Adds message `i` and the template's text before it. Returns false if the template drops or
  /// changes the message.
  bool add(std::size_t i) {
    const std::string mark = message_mark(i);
    const std::size_t found = m_glue.find(mark, m_place);
    if (found == std::string::npos) return false;
    const std::string between = m_glue.substr(m_place, found - m_place);
    m_place = found + mark.size();
    m_all += between;
    m_text += between;
    const bool is_last = i + 1 == m_messages.size();
    const std::size_t next = is_last ? m_glue.size() : m_glue.find(message_mark(i + 1), m_place);
    const std::string after =
        next == std::string::npos ? m_glue.substr(m_place) : m_glue.substr(m_place, next - m_place);
    const std::optional<std::string> content = rendered(m_messages[i], after);
    if (!content) return false;
    m_all += *content;
    switch (m_messages[i].role) {
      case ChatRole::system:
        m_text += *content;
        break;
      case ChatRole::assistant:
        end(Segment::Kind::question);
        m_text = *content;
        end(Segment::Kind::generated);
        break;
      case ChatRole::user:
        add_user(m_parts[i], *content);
        break;
    }
    if (is_last) {
      m_text += after;
      m_all += after;
      end(Segment::Kind::question);
    }
    return true;
  }

  /// Returns the content as the template writes it: unchanged, without blanks around it or without
  /// thoughts. `after`: the template's text after it. Returns nothing if the template changes the
  /// content in another way.
  std::optional<std::string> rendered(const ChatMessage& message, const std::string& after) const {
    const auto fits = [&](const std::string& content) {
      return m_whole.compare(m_all.size(), content.size(), content) == 0 &&
             m_whole.compare(m_all.size() + content.size(), after.size(), after) == 0;
    };
    if (fits(message.content)) return message.content;
    std::string content = stripped(message.content);
    if (fits(content)) return content;
    if (message.role != ChatRole::assistant) return {};
    // Templates leave out the thoughts of earlier turns.
    const std::string end_of_thoughts = "</think>";
    const std::size_t thought = content.rfind(end_of_thoughts);
    if (thought == std::string::npos) return {};
    content.erase(0, thought + end_of_thoughts.size());
    content.erase(0, std::min(content.find_first_not_of('\n'), content.size()));
    if (fits(content)) return content;
    return {};
  }

  void add_user(const std::vector<std::string>& parts, const std::string& content) {
    std::size_t total = 0;
    for (const std::string& part : parts) total += part.size();
    if (parts.size() < 2 || total != content.size()) {
      m_text += content;
      return end(Segment::Kind::context, true);
    }
    for (std::size_t p = 0; p + 1 < parts.size(); ++p) {
      m_text += parts[p];
      end(Segment::Kind::context);
    }
    m_text += parts.back();  // part of the question, which ends with the template's text
  }

  /// Ends the current segment.
  void end(Segment::Kind kind, bool branches = false) {
    if (!m_text.empty()) m_segments.push_back({kind, m_tokenizer.encode(m_text), {}, branches});
    m_text.clear();
  }

  /// Marks the end of a system message, which many conversations share.
  void add_cut() {
    if (m_messages.front().role != ChatRole::system || m_messages.size() < 2) return;
    const std::string& system = m_messages.front().content;
    const std::size_t place = m_whole.find(system);
    Segment& first = m_segments.front();
    if (place == std::string::npos || first.kind != Segment::Kind::context) return;
    const auto shared = m_tokenizer.encode(m_whole.substr(0, place + system.size())).size();
    if (shared > 0 && shared < first.tokens.size()) {
      first.cuts.push_back(static_cast<std::int64_t>(shared));
    }
  }

  const std::vector<ChatMessage>& m_messages;
  const std::vector<std::vector<std::string>>& m_parts;
  const Tokenizer& m_tokenizer;
  std::string m_whole;
  std::string m_glue;       // the rendered conversation with marks in place of contents
  std::size_t m_place = 0;  // in m_glue
  std::string m_all;        // of m_whole, so far
  std::string m_text;       // of the current segment
  std::vector<Segment> m_segments;
};

}  // namespace

std::vector<Segment> segments_of(const std::vector<ChatMessage>& messages,
                                 const std::vector<std::vector<std::string>>& parts, bool thinking,
                                 const ServedModel& model) {
  if (!model.chat_template || !model.tokenizer) {
    throw BadRequest("messages", "the model has no known chat template; use /v1/completions");
  }
  if (messages.back().role != ChatRole::assistant) {
    return Splitter(messages, parts, "", thinking, model)();
  }
  const std::vector<ChatMessage> before(messages.begin(), messages.end() - 1);
  return Splitter(before, parts, messages.back().content, thinking, model)();
}

}  // namespace kvzap::server
