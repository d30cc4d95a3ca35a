// Calls of tools as rules of a grammar, in the ways in which families write them.
#pragma once

#include <functional>
#include <string_view>

#include "grammar/expression.hpp"
#include "server/answer_parts.hpp"

namespace kvzap::server {

/// Returns the expression of a mark: its special token, or its bytes.
using MarkWriter = std::function<grammar::Expr(std::string_view mark)>;

/// Blanks between parts of an answer: none, a space, or a line end.
grammar::Expr blank();
/// Text up to a mark, and the mark. `mark` may be a special token.
grammar::Expr up_to(std::string_view mark, const MarkWriter& write);
/// Text without a mark.
grammar::Expr text_without(std::string_view mark, const MarkWriter& write);

/// Adds the rules of one or more calls (one, if `format.calls_once`) with their marks, except those
/// of harmony. Arguments are valid under the schemas of the tools: those with `strict` true have no
/// further keys, and those with `strict` false are any object. So are those of a tool without
/// `strict` whose schema has keywords that grammars cannot express. Throws BadRequest for such a
/// schema of a strict tool.
grammar::Expr calls_expression(const AnswerFormat& format, const MarkWriter& write,
                               grammar::Grammar& grammar);
/// The same for a message of harmony, from its recipient on.
grammar::Expr harmony_call(const AnswerFormat& format, const MarkWriter& write,
                           grammar::Grammar& grammar);

}  // namespace kvzap::server
