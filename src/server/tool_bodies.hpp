// Calls of tools as families write them.
#pragma once

#include <memory>
#include <string>

#include "server/answer_parts.hpp"
#include "server/call_reader.hpp"

namespace kvzap::server {

/// The marks around calls. `end` is empty if there is no mark behind them.
struct CallMarks {
  std::string begin, end;
};
CallMarks marks_of(ToolStyle style);

/// Returns the reader of the calls in `text`, behind the first mark of the format's style; null if
/// more of it must be known. `recipient`: of a message of harmony. `is_silent`: as CallReader's.
/// `format` must outlive the reader.
std::unique_ptr<CallReader> make_call_reader(const AnswerFormat& format,
                                             const std::string& recipient, bool is_silent,
                                             Cursor text);

}  // namespace kvzap::server
