#include "console/library_settings.hpp"

#include <cstdlib>  // defines __GLIBC__

#if defined(__linux__) && defined(__GLIBC__)

#include <unistd.h>

#include <cstring>
#include <iterator>
#include <string>

namespace kvzap::driver {
namespace {

struct Setting {
  char entry[32];       // "NAME=value", as in an environment
  const char* instead;  // a variable that also decides, if the user has set it, or nullptr
};

// The environment refers to these entries, so they are neither constant nor copies.
Setting settings[] = {
    // libgomp's threads otherwise spin for milliseconds after each loop. Decode with -t 2 on two
    // cores, Zen 3: 0.2 % slower with 400 spins than with libgomp's 300,000. Sapphire Rapids, whose
    // threads wake up more slowly: 20 % slower with 400, as fast with 4,000. There, beside a busy
    // process, a token takes 66, 71 and 234 ms with 400, 4,000 and 300,000 spins.
    {"GOMP_SPINCOUNT=4000", "OMP_WAIT_POLICY="},
    // OpenBLAS' threads spin likewise; 2^15 cycles are 10 µs.
    {"OPENBLAS_THREAD_TIMEOUT=15", nullptr},
    // OpenBLAS starts threads while it is loaded. Each thread retries to allocate 128 MB until it
    // succeeds, and the process cannot end before that. It hung if memory was short.
    {"OPENBLAS_NUM_THREADS=1", nullptr},
};

// Variables of shells. No library reads them in a constructor.
constexpr const char* of_shells[] = {
    "_=",         "SHLVL=",       "OLDPWD=",   "PWD=",   "LOGNAME=", "USER=",    "MAIL=",
    "LS_COLORS=", "HISTCONTROL=", "HOSTNAME=", "SHELL=", "TERM=",    "LESSOPEN="};

/// A setting in the place of one of the user's entries.
struct Loan {
  char** place = nullptr;
  char* entry = nullptr;  // the user's
};
Loan loans[std::size(settings)];
bool all_are_placed = false;

/// Returns the place of the variable in an environment, or nullptr. `name`: ends with "=".
char** find(char** environment, const char* name, std::size_t length) {
  for (char** place = environment; *place; ++place) {
    if (std::strncmp(*place, name, length) == 0) return place;
  }
  return nullptr;
}

char** find(char** environment, const char* name) {
  return find(environment, name, std::strlen(name));
}

bool is_left_to_the_user(char** environment, const Setting& setting) {
  const std::size_t name = std::strcspn(setting.entry, "=") + 1;
  return find(environment, setting.entry, name) ||
         (setting.instead && find(environment, setting.instead));
}

/// Steps of training have many short loops: a training with -t 2 beside a busy process takes 1.2
/// times the processor time of -t 1 with 400 spins, and 1.8 times with 4,000 (Zen 3).
constexpr char spins_of_training[] = "GOMP_SPINCOUNT=400";

/// Runs before the constructors of shared libraries. The C library has no copy of the environment
/// yet and will use this array, which has no room at its end. So settings take the places of
/// entries that no constructor reads.
void place_settings(int argc, char** argv, char** environment) {
  if (argc > 1 && std::strcmp(argv[1], "train") == 0) {
    std::memcpy(settings[0].entry, spins_of_training, sizeof(spins_of_training));
  }
  std::size_t next = 0;
  for (std::size_t i = 0; i < std::size(settings); ++i) {
    if (is_left_to_the_user(environment, settings[i])) continue;
    char** place = nullptr;
    while (!place && next < std::size(of_shells)) place = find(environment, of_shells[next++]);
    if (!place) return;
    loans[i] = {place, *place};
    *place = settings[i].entry;
  }
  all_are_placed = true;
}

// Not constant: with HIP, Clang takes constants for the device, which lacks the function.
__attribute__((section(".preinit_array"),
               used)) void (*before_constructors)(int, char**, char**) = place_settings;

}  // namespace

void settle_library_settings(char** argv) {
  for (const Loan& loan : loans) {
    if (loan.place) *loan.place = loan.entry;
  }
  // The first process sets it for the second. It lists the settings that are not the user's.
  constexpr const char* marker = "KVZAP_RESTARTED";
  const auto name_of = [](const Setting& setting) {
    return std::string(setting.entry, std::strcspn(setting.entry, "="));
  };
  if (const char* const restarted = std::getenv(marker)) {
    const std::string ours = restarted;
    unsetenv(marker);
    for (const Setting& setting : settings) {
      if (ours.find(name_of(setting)) != std::string::npos) unsetenv(name_of(setting).c_str());
    }
    return;
  }
  if (all_are_placed) return;
  std::string ours;
  for (const Setting& setting : settings) {
    if (is_left_to_the_user(environ, setting)) continue;
    const std::string name = name_of(setting);
    setenv(name.c_str(), setting.entry + name.size() + 1, 1);
    ours += name + " ";
  }
  setenv(marker, ours.c_str(), 1);
  execv("/proc/self/exe", argv);
  unsetenv(marker);
}

}  // namespace kvzap::driver

#else

namespace kvzap::driver {

void settle_library_settings(char** /*argv*/) {}

}  // namespace kvzap::driver

#endif
