// Policies, modifiers and parameters in a list, by their names.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

namespace kvzap::policy {

/// Returns the member of the list with this name, or null.
template <class Infos>
auto find_named(const Infos& infos, std::string_view name) -> const typename Infos::value_type* {
  const auto found =
      std::find_if(infos.begin(), infos.end(), [&](const auto& info) { return info.name == name; });
  return found == infos.end() ? nullptr : &*found;
}

/// Returns the names in the order of the list.
template <class Infos>
std::vector<std::string> names_of(const Infos& infos) {
  std::vector<std::string> names;
  names.reserve(infos.size());
  for (const auto& info : infos) names.push_back(info.name);
  return names;
}

}  // namespace kvzap::policy
