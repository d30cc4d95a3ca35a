#include "options/kokkos_flags.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <Kokkos_Core.hpp>
#include <algorithm>
#include <string_view>
#include <vector>

#include "files/decimal.hpp"
#include "files/nearest.hpp"
#include "options/strict_values.hpp"

namespace kvzap::driver {
namespace {

struct KokkosFlag {
  const char* name = "";
  enum Value { none, text, number } value = none;
  int since = 0;          // KOKKOS_VERSION
  int until = 1'000'000;  // exclusive
};

/// Flags of Kokkos 3.4 to 5. Flags with an `until` have a newer name.
constexpr KokkosFlag kokkos_flags[] = {{"--kokkos-help", KokkosFlag::none},
                                       {"--kokkos-disable-warnings", KokkosFlag::none},
                                       {"--kokkos-print-configuration", KokkosFlag::none, 30700},
                                       {"--kokkos-tune-internals", KokkosFlag::none},
                                       {"--kokkos-num-threads", KokkosFlag::number, 30700},
                                       {"--kokkos-threads", KokkosFlag::number, 0, 40000},
                                       {"--kokkos-numa", KokkosFlag::number, 0, 40000},
                                       {"--kokkos-device-id", KokkosFlag::number},
                                       {"--kokkos-device", KokkosFlag::number, 0, 40000},
                                       {"--kokkos-map-device-id-by", KokkosFlag::text, 30700},
                                       {"--kokkos-num-devices", KokkosFlag::text, 0, 40000},
                                       {"--kokkos-ndevices", KokkosFlag::text, 0, 40000},
                                       {"--kokkos-tools-libs", KokkosFlag::text, 30700},
                                       {"--kokkos-tools-library", KokkosFlag::text},
                                       {"--kokkos-tools-args", KokkosFlag::text},
                                       {"--kokkos-tools-help", KokkosFlag::none}};

}  // namespace

std::string fault_of_kokkos_flag(const std::string& flag) {
  const std::string name = flag.substr(0, flag.find('='));
  std::vector<std::string> known;
  for (const KokkosFlag& entry : kokkos_flags) {
    if (KOKKOS_VERSION < entry.since || KOKKOS_VERSION >= entry.until) continue;
    if (name == entry.name) {
      const std::string value = flag.substr(std::min(flag.size(), name.size() + 1));
      if (entry.value == KokkosFlag::none) return "";
      if (value.empty()) return fmt::format("{} needs a value; expected {}=VALUE", name, name);
      int number = 0;  // Kokkos reports a wrong value without naming it, or not at all
      const bool is_number =
          files::read_whole(value, number) == files::DecimalFault::none && number >= 0;
      return entry.value == KokkosFlag::number && !is_number
                 ? fmt::format("{} is {}; expected a whole number of 0 or more", name,
                               in_quotes(value))
                 : "";
    }
    known.emplace_back(entry.name);
  }
  // Compares without the common prefix, which would make all flags similar.
  constexpr std::size_t prefix = std::string_view("--kokkos-").size();
  std::vector<std::string> ends;
  ends.reserve(known.size());
  for (const std::string& one : known) ends.push_back(one.substr(prefix));
  const std::string nearest = files::nearest_name(name.substr(prefix), ends);
  return fmt::format(
      "unknown option {}; {}", name,
      nearest.empty()
          ? fmt::format("Kokkos {}.{}.{} knows {}", KOKKOS_VERSION / 10000,
                        KOKKOS_VERSION / 100 % 100, KOKKOS_VERSION % 100, fmt::join(known, ", "))
          : "did you mean --kokkos-" + nearest + "?");
}

}  // namespace kvzap::driver
