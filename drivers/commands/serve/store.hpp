// The folder of --prefix-store: states of documents that outlive a server.
#pragma once

#include <kvzap/engine/pruning.hpp>
#include <kvzap/server/prefix_store.hpp>
#include <kvzap/server/protocol.hpp>
#include <memory>

#include "commands/serve/serve.hpp"
#include "commands/support/setup.hpp"

namespace kvzap::driver {

/// Throws UsageError for wrong values of --prefix-store and --prefix-store-size.
void check_prefix_store(const ServeOptions& options);

/// Opens the folder for a server with this pruning, whose window the rows of the ring bound. Warns
/// on standard error. `model` must outlive the store. Throws Error that names --prefix-store.
std::unique_ptr<server::PrefixStore> open_prefix_store(const ServeOptions& options,
                                                       const ModelSetup& setup,
                                                       const Pruning& pruning,
                                                       const server::ServedModel& model);

}  // namespace kvzap::driver
