// Prepares the three standard streams and the signals of write errors, before anything else runs.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <csignal>

namespace kvzap::driver {

/// Opens standard streams that are closed. Otherwise the next file, such as a snapshot, would get
/// the number of standard error, and messages would be written into it. Reading such an input or
/// writing such an output fails as if it were closed; messages are lost.
///
/// A pipe without a reader (SIGPIPE) and a file beyond the user's size limit (SIGXFSZ) become
/// errors of the write call. The writer can then report them and remove unfinished files.
inline void prepare_standard_streams() {
  constexpr int modes[] = {O_WRONLY, O_RDONLY, O_RDWR};
  for (int stream = 0; stream < 3; ++stream) {
    if (fcntl(stream, F_GETFD) >= 0) continue;
    // open returns the lowest free number, which is the closed stream.
    static_cast<void>(open("/dev/null", modes[stream]));
  }
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
}

}  // namespace kvzap::driver
