// Work that commands share before their own: they load the model's configuration, assign it to
// ranks, check memory, and measure the process.
#pragma once

#include <kvzap/core/communicator.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "options/rope_options.hpp"
#include "session/model_setup.hpp"

namespace kvzap::driver {

using session::load_surrogate;
using session::ModelSetup;
using session::ring_rows;

/// Reads `folder`'s config.json and assigns its KV heads to ranks, evenly or by the kept rows in
/// the file `placement` of an earlier run. If `layers` is given, only that many of the first layers
/// are used. `rope` replaces config.json's RoPE scaling. Throws Error if the model has fewer
/// layers, and the errors of apply_rope.
ModelSetup set_up_model(const std::string& folder, std::optional<std::int64_t> layers,
                        const std::string& placement, int ranks, const RopeOptions& rope = {});

/// Prints config.json's warnings to standard error, even with -q, because unknown fields may
/// matter. If `talks`, also reports omitted layers. For rank 0.
void print_notes(const ModelSetup& setup, bool talks);

/// Returns the memory that caches on this node's ranks may still allocate together; -1 if it is
/// unknown, or if they are on a device.
std::int64_t available_bytes_of_node();

/// Throws Error if a run cannot fit in memory. Call it early: minutes later the system would kill a
/// rank without a message. `bytes`: memory that the largest rank needs for `purpose`.
void check_memory(std::int64_t bytes, int ranks_on_node, const std::string& purpose);

/// Sets the number of threads: `asked`, or, if absent, the cores of this rank. Every rank of the
/// node calls it. If `talks`, warns if the ranks have more threads than the node has cores. Throws
/// AgreedError on all ranks if the number is out of range.
void use_threads(std::optional<std::int64_t> asked, const Communicator& comm, bool talks);

/// Returns the peak resident memory of this process, since reset_peak_rss if the system supports a
/// reset.
std::int64_t peak_rss_bytes();
/// Resets peak_rss_bytes, if the system allows it.
void reset_peak_rss();

/// Tests whether the report can be written to the file of --json ("-" is standard output, "" none).
/// Throws Error.
void check_writable(const std::string& file);
/// Writes a report to the file, replacing an older one in one step (files::replace_file), or to a
/// device or pipe. Throws Error.
void write_whole(const std::string& file, const std::string& text,
                 const std::string& flag = "--json");

/// The message of flush_stdout after the reader of a pipe, such as head, has ended.
inline constexpr std::string_view closed_pipe =
    "standard output: its reader has closed the pipe before the end";
/// Flushes standard output. Throws Error if a write failed: closed_pipe if its reader has ended.
void flush_stdout();

}  // namespace kvzap::driver
