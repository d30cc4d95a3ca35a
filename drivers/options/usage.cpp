#include "options/usage.hpp"

namespace kvzap::driver {

void require(bool good, const std::string& message) {
  if (!good) throw UsageError(message);
}

void as_usage(const std::function<void()>& check) {
  try {
    check();
  } catch (const UsageError&) {
    throw;
  } catch (const Error& error) {
    throw UsageError(error.what());
  }
}

void agree_on_usage(const Communicator& comm, const std::function<void()>& work) {
  bool is_usage = false;
  try {
    comm.agree([&] {
      try {
        work();
      } catch (const UsageError&) {
        is_usage = true;
        throw;
      }
    });
  } catch (const AgreedError& error) {
    if (comm.all_reduce_max(std::int64_t{is_usage}) == 0) throw;
    throw AgreedUsageError(error.what());
  }
}

}  // namespace kvzap::driver
