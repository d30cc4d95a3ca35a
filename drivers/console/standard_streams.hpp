// The three standard streams and the signals that writing raises, put in order before all else.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <csignal>

namespace kvzap::driver {

/// Gives standard streams that are closed something to be: else the next file that is opened, such
/// as a snapshot, takes the number of standard error, and messages are written into it. Reading
/// such an input and writing such an output fails as if it were closed; messages are lost.
///
/// Nobody reads the pipe (SIGPIPE) and a file that is larger than the user may write (SIGXFSZ)
/// become errors of the call that writes, so that whoever writes can tell it and remove what is
/// unfinished.
inline void prepare_standard_streams() {
  constexpr int modes[] = {O_WRONLY, O_RDONLY, O_RDWR};
  for (int stream = 0; stream < 3; ++stream) {
    if (fcntl(stream, F_GETFD) >= 0) continue;
    // The lowest number that is free is the one that is missing.
    static_cast<void>(open("/dev/null", modes[stream]));
  }
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
}

}  // namespace kvzap::driver
