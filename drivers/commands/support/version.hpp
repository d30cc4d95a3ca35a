#pragma once

namespace kvzap::driver {

/// "0.1.0"
extern const char* const version;
/// The revision of the sources as Git describes it, or "unknown".
extern const char* const revision;

}  // namespace kvzap::driver
