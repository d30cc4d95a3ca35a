// The locale "C" for libraries that read or print numbers by the locale of the process.
#pragma once

#include <clocale>
#if defined(__APPLE__)
#include <xlocale.h>
#endif

namespace kvzap::files {

/// While it lives, C functions that its thread calls use the locale "C". Other threads and the
/// locale of the process are not affected. Destroy it on the thread that made it, the latest first.
class CLocale {
 public:
  CLocale() : m_before(uselocale(c())) {}
  ~CLocale() { uselocale(m_before); }
  CLocale(const CLocale&) = delete;
  CLocale& operator=(const CLocale&) = delete;

 private:
  static locale_t c() {
    static const locale_t locale = newlocale(LC_ALL_MASK, "C", nullptr);
    return locale;
  }

  locale_t m_before;
};

}  // namespace kvzap::files
