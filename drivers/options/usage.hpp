// Errors in the command line itself, for which the program exits with status 2 instead of 1.
#pragma once

#include <functional>
#include <kvzap/core/communicator.hpp>
#include <string>

namespace kvzap::driver {

/// The exit status for an error in the command line or in a deck, which is a part of it.
constexpr int exit_usage = 2;

/// The command line is wrong: a value out of range, a missing option, options that exclude each
/// other. An Error of another type is a failure of the work: a damaged file, a full disk.
class UsageError : public Error {
 public:
  using Error::Error;
};

/// A UsageError that every rank knows.
class AgreedUsageError : public AgreedError {
 public:
  using AgreedError::AgreedError;
};

/// Throws UsageError with the message unless `good`.
void require(bool good, const std::string& message);

/// Throws UsageError if `file` is "-", for an option that cannot read standard input.
void require_no_stdin(const std::string& file, const std::string& flag);

/// Runs a check of options by functions of the library. Their Errors become UsageErrors, except for
/// files::MissingFile.
void as_usage(const std::function<void()>& check);

/// Communicator::agree for work that checks options: if it throws UsageError on any rank, every
/// rank throws AgreedUsageError. Collective.
void agree_on_usage(const Communicator& comm, const std::function<void()>& work);
/// The same for work of rank 0 alone, as Communicator::agree_on_root. Collective.
void agree_on_usage_of_root(const Communicator& comm, const std::function<void()>& work);

}  // namespace kvzap::driver
