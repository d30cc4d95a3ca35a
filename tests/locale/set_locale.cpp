// Preloaded, sets the locale that KVZAP_TEST_LOCALE names before the program begins, as a host
// application would. Ends the process if it is missing.
#include <cstdio>
#include <cstdlib>
#include <locale>
#include <stdexcept>

namespace {

__attribute__((constructor)) void set_locale() {
  const char* const name = std::getenv("KVZAP_TEST_LOCALE");
  if (!name) return;
  try {
    std::locale::global(std::locale(name));  // of streams and of C functions
  } catch (const std::runtime_error&) {
    std::fprintf(stderr, "set_locale: no locale %s\n", name);
    std::_Exit(77);
  }
}

}  // namespace
