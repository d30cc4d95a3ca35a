// How a text says how many pages steps of one token read.
#include <fmt/format.h>

#include <kvzap/engine/engine.hpp>

#include "files/decimal.hpp"
#include "files/quote.hpp"

namespace kvzap {

std::string name_of(const ReadPages& read) {
  if (read.all()) return "all";
  return read.pages > 0 ? fmt::format("{}", read.pages) : fmt::format("{}", read.share);
}

ReadPages read_pages_from_name(const std::string& text) {
  ReadPages read;
  if (text == "all") return read;
  const bool is_whole = files::read_whole(text, read.pages) == files::DecimalFault::none;
  if (is_whole && read.pages >= 1) return read;
  read.pages = 0;
  const bool is_share =
      !is_whole && files::read_real(text, read.share) == files::DecimalFault::none;
  if (is_share && read.share > 0 && read.share <= 1) return read;
  throw Error(
      fmt::format("is {}; expected a number of pages of at least 1, a share above 0 and at most 1 "
                  "with a point, such as 0.25, or all",
                  files::in_quotes(text)));
}

}  // namespace kvzap
