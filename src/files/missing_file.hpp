// Files that a user names and that do not exist.
#pragma once

#include <kvzap/core/types.hpp>

namespace kvzap::files {

/// A file that an option or a policy names does not exist. The option itself is well-formed.
class MissingFile : public Error {
 public:
  using Error::Error;
};

}  // namespace kvzap::files
