#include "grammar/regular_match.hpp"

#include <algorithm>
#include <cstddef>
#include <map>
#include <utility>
#include <vector>

namespace kvzap::grammar {
namespace {

using Kind = Expression::Kind;
/// Sorted.
using Places = std::vector<std::size_t>;

class Matching {
 public:
  explicit Matching(std::string_view text) : m_text(text) {}

  /// Where texts of the expression that begin at `from` end.
  const Places& ends(const Expression& expression, std::size_t from) {
    const auto key = std::make_pair(&expression, from);
    const auto known = m_ends.find(key);
    if (known != m_ends.end()) return known->second;
    Places found = found_ends(expression, from);
    return m_ends.emplace(key, std::move(found)).first->second;
  }

 private:
  Places ends_from(const Expression& expression, const Places& from) {
    Places all;
    for (const std::size_t place : from) {
      const Places& found = ends(expression, place);
      all.insert(all.end(), found.begin(), found.end());
    }
    std::sort(all.begin(), all.end());
    all.erase(std::unique(all.begin(), all.end()), all.end());
    return all;
  }

  Places found_ends(const Expression& expression, std::size_t from) {
    switch (expression.kind) {
      case Kind::nothing:
        return {};
      case Kind::bytes:
        if (from < m_text.size() && expression.bytes[static_cast<unsigned char>(m_text[from])]) {
          return {from + 1};
        }
        return {};
      case Kind::text:
        if (m_text.compare(from, expression.text.size(), expression.text) != 0) return {};
        return {from + expression.text.size()};
      case Kind::sequence: {
        Places places = {from};
        for (const Expr& part : expression.parts) {
          if (places.empty()) break;
          places = ends_from(*part, places);
        }
        return places;
      }
      case Kind::choice: {
        Places all;
        for (const Expr& part : expression.parts) {
          const Places& found = ends(*part, from);
          all.insert(all.end(), found.begin(), found.end());
        }
        std::sort(all.begin(), all.end());
        all.erase(std::unique(all.begin(), all.end()), all.end());
        return all;
      }
      case Kind::repeat:
        return repeated_ends(expression, from);
      case Kind::both:
      case Kind::difference: {
        const Places a = ends(*expression.parts[0], from), b = ends(*expression.parts[1], from);
        Places result;
        if (expression.kind == Kind::both) {
          std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(result));
        } else {
          std::set_difference(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(result));
        }
        return result;
      }
      case Kind::token:
      case Kind::call:
        break;
    }
    throw Error("a grammar's rule where only bytes may be");
  }

  Places repeated_ends(const Expression& expression, std::size_t from) {
    Places places = {from}, all;
    for (std::int64_t count = 0; !places.empty(); ++count) {
      if (count >= expression.least) all.insert(all.end(), places.begin(), places.end());
      if (count == expression.most) break;
      Places next = ends_from(*expression.parts[0], places);
      if (next == places && count >= expression.least) break;
      // The same for all further counts: those up to `least` add nothing new.
      if (next == places) count = expression.least - 1;
      places = std::move(next);
    }
    std::sort(all.begin(), all.end());
    all.erase(std::unique(all.begin(), all.end()), all.end());
    return all;
  }

  std::string_view m_text;
  std::map<std::pair<const Expression*, std::size_t>, Places> m_ends;
};

}  // namespace

bool matches(const Expr& expression, std::string_view text) {
  const Places ends = Matching(text).ends(*expression, 0);
  return std::binary_search(ends.begin(), ends.end(), text.size());
}

}  // namespace kvzap::grammar
