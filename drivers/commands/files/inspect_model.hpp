// `kvzap inspect` of a model: its shape, its tensors, and the contexts that fit this machine.
#pragma once

#include <kvzap/core/communicator.hpp>
#include <string>

namespace kvzap::driver {

/// Returns whether the file is a GGUF file or a folder with config.json or GGUF files, or is
/// missing and has a name of the hub.
bool is_model(const std::string& file);

/// Prints the model, as JSON if `as_json`. Reads headers alone, no weights. A model that kvzap
/// cannot run is described as far as its files tell, with the reason. For one rank. Throws Error.
void inspect_model(const std::string& file, bool as_json, const std::string& version);

}  // namespace kvzap::driver
