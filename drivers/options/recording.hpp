// What a snapshot does with the options of the run that writes it.
#pragma once

#include <CLI/CLI.hpp>

namespace kvzap::driver {

/// Whether snapshots record an option, and whether a run may resume with another value of it.
enum class Recording {
  none,  // inputs, outputs and settings of the machine
  free,  // recorded, but the cache's rows do not depend on it
  fixed  // the rows depend on it
};

/// An option says it at its declaration by Option::check(not_recorded()) or check(may_change()), or
/// by its group: Output and Snapshots are not recorded, Generation may change. Any other is fixed.
Recording recording_of(const CLI::Option& option);

/// Validators that accept every value.
const CLI::Validator& not_recorded();
const CLI::Validator& may_change();

}  // namespace kvzap::driver
