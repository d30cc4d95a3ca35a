#include <fmt/format.h>

#include <algorithm>
#include <kvzap/metrics.hpp>
#include <kvzap/types.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/nearest.hpp"
#include "text/utf8.hpp"

namespace kvzap {
namespace {

std::string metric_lower(std::string_view text) {
  std::string valid;
  detail::append_lossy(valid, text, true);
  std::string lower;
  lower.reserve(valid.size());
  for (std::size_t position = 0; position < valid.size();) {
    const auto [codepoint, length] =
        detail::first_character(std::string_view(valid).substr(position));
    position += length;
    detail::append_utf8(lower, utf8proc_tolower(codepoint));
  }
  return lower;
}

// The share of the expected answers that the answer holds, upper and lower case alike.
double metric_share_held(const Task& task, std::string_view answer) {
  const std::string lower = metric_lower(answer);
  const auto held =
      std::count_if(task.answers.begin(), task.answers.end(), [&](const std::string& expected) {
        return lower.find(metric_lower(expected)) != std::string::npos;
      });
  return static_cast<double>(held) / static_cast<double>(task.answers.size());
}

}  // namespace

const std::vector<MetricInfo>& metrics() {
  static const std::vector<MetricInfo> infos = {
      {"string_match_all",
       "share of the expected answers that the answer contains, upper and lower case alike (RULER)",
       false, false, 128, metric_share_held, nullptr},
      {"string_match_part",
       "the answer contains one of the expected answers, upper and lower case alike (RULER)", false,
       false, 32,
       [](const Task& task, std::string_view answer) {
         return metric_share_held(task, answer) > 0 ? 1.0 : 0.0;
       },
       nullptr}};
  return infos;
}

const MetricInfo& metric_of(const Task& task) {
  const std::string name = !task.metric.empty()                  ? task.metric
                           : task.task.compare(0, 3, "qa_") == 0 ? "string_match_part"
                                                                 : "string_match_all";
  std::vector<std::string> names;
  for (const MetricInfo& info : metrics()) {
    if (info.name == name) return info;
    names.push_back(info.name);
  }
  const std::string nearest = detail::nearest_name(name, names);
  throw Error(fmt::format("metric: expected the name of a metric, found {}{}", name,
                          nearest.empty() ? "" : fmt::format("; did you mean {}?", nearest)));
}

std::int64_t default_max_new_tokens(const Task& task) { return metric_of(task).max_new_tokens; }

}  // namespace kvzap
