// Segments of a conversation, as its chat template renders it.
#pragma once

#include <kvzap/server/protocol.hpp>
#include <string>
#include <vector>

namespace kvzap::server {

/// Splits a rendered conversation into segments. Each user message is a context, judged at its end.
/// The text between it and the answer is a question, and earlier answers are generated. If a
/// message has several parts, its last part belongs to the question. A last message of the
/// assistant is the beginning of the answer: the model continues it. Throws BadRequest.
std::vector<Segment> segments_of(const std::vector<ChatMessage>& messages,
                                 const std::vector<std::vector<std::string>>& parts, bool thinking,
                                 const ServedModel& model);

}  // namespace kvzap::server
