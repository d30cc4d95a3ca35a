// What subcommands do before their own work: which model, how it is dealt to ranks, whether it
// fits, and what the process itself has taken.
#pragma once

#include <kvzap/core/communicator.hpp>
#include <optional>
#include <string>

#include "options/rope_options.hpp"
#include "session/model_setup.hpp"

namespace kvzap::driver {

using detail::load_surrogate;
using detail::ModelSetup;
using detail::ring_rows;

/// Reads `folder`'s config.json and deals its KV heads, evenly or by the kept rows in the file
/// `placement` of an earlier run. With `layers`, only that many of the first ones are used; `rope`
/// replaces config.json's RoPE scaling. Throws Error if there are not so many layers, and as
/// apply_rope does.
ModelSetup set_up_model(const std::string& folder, std::optional<std::int64_t> layers,
                        const std::string& placement, int ranks, const RopeOptions& rope = {});

/// Prints config.json's warnings to standard error (fields that are not known may matter, so that
/// -q does not hide them), and, if `talks`, that layers are left out. For rank 0.
void print_notes(const ModelSetup& setup, bool talks);

/// Memory that caches on this node's ranks may still take together; -1 if nobody knows, or if they
/// are on a device.
std::int64_t available_bytes_of_node();

/// Refuses what cannot fit before minutes are spent on it: the system would otherwise kill a rank
/// without a word. `bytes`: what the largest rank needs for `purpose`. Throws Error.
void check_memory(std::int64_t bytes, int ranks_on_node, const std::string& purpose);

/// Computes on so many threads, or, if none are asked for, on those that this rank has cores for;
/// of every rank of the node. Warns, if `talks`, where they are more than the node's cores. Throws
/// AgreedError for a number out of range, which all ranks have been given.
void use_threads(std::optional<std::int64_t> asked, const Communicator& comm, bool talks);

/// Most memory that this process ever had resident, or since reset_peak_rss if the system has that.
std::int64_t peak_rss_bytes();
/// Starts peak_rss_bytes anew, where the system lets a process do so.
void reset_peak_rss();

/// Tries whether the report can be written to the file that --json names ("-" is standard output,
/// "" none). Throws Error.
void check_writable(const std::string& file);
/// Writes a report there: beside the target, which it then replaces, so that an older file stays
/// whole if the disk is full. Devices and pipes are written to as they are. Throws Error.
void write_whole(const std::string& file, const std::string& text,
                 const std::string& flag = "--json");

/// Throws Error if what was printed could not be written.
void flush_stdout();

}  // namespace kvzap::driver
