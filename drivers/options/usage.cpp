#include "options/usage.hpp"

#include "files/missing_file.hpp"
#include "parallel/agree_as.hpp"

namespace kvzap::driver {
namespace {

void agree(const Communicator& comm, const std::function<void()>& work, bool on_root) {
  parallel::agree_as<AgreedUsageError>(
      comm,
      [&](bool& is_usage) {
        try {
          work();
        } catch (const UsageError&) {
          is_usage = true;
          throw;
        }
      },
      on_root);
}

}  // namespace

void require(bool good, const std::string& message) {
  if (!good) throw UsageError(message);
}

void require_no_stdin(const std::string& file, const std::string& flag) {
  require(file != "-", flag + " - is standard input, which is not read here; give a file");
}

void as_usage(const std::function<void()>& check) {
  try {
    check();
  } catch (const UsageError&) {
    throw;
  } catch (const files::MissingFile&) {
    throw;
  } catch (const Error& error) {
    throw UsageError(error.what());
  }
}

void agree_on_usage(const Communicator& comm, const std::function<void()>& work) {
  agree(comm, work, false);
}

void agree_on_usage_of_root(const Communicator& comm, const std::function<void()>& work) {
  agree(comm, work, true);
}

}  // namespace kvzap::driver
