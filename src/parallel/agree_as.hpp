// Agreement of all ranks on the kind of an error.
#pragma once

#include <kvzap/core/communicator.hpp>

namespace kvzap::parallel {

/// Runs `work(is_special)` on each rank as Communicator::agree, or on rank 0 alone as
/// agree_on_root. If work throws on any rank and has set is_special on any, every rank throws
/// `Special`, which derives from AgreedError; else AgreedError. Collective.
template <class Special, class Work>
void agree_as(const Communicator& comm, const Work& work, bool on_root = false) {
  bool is_special = false;
  const auto marked = [&] { work(is_special); };
  try {
    on_root ? comm.agree_on_root(marked) : comm.agree(marked);
  } catch (const AgreedError& error) {
    if (comm.all_reduce_max(std::int64_t{is_special}) == 0) throw;
    throw Special(error.what());
  }
}

}  // namespace kvzap::parallel
