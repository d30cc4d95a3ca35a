// Small, because each commit changes it.
#include "commands/support/version.hpp"

#include <kvzap/config.hpp>

namespace kvzap::driver {

const char* const version = KVZAP_VERSION;
const char* const revision = KVZAP_REVISION;

}  // namespace kvzap::driver
