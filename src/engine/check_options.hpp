// Refuses options of an engine that do not fit together.
#pragma once

#include <kvzap/engine/engine.hpp>

namespace kvzap::detail {

/// Throws Error if the options contradict each other, or need a scorer that the engine lacks.
void check_options(const CacheOptions& options, bool has_scorer);

/// Refuses policies that turn keys or queries where no one frequency fits all that are cached.
void check_rope(const CacheOptions& options, const ModelConfig& config);

}  // namespace kvzap::detail
