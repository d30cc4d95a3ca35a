// What tests on several ranks share: a folder, and fewer ranks than there are.
#pragma once

#include <stdlib.h>

#include <filesystem>
#include <kvzap/core/communicator.hpp>
#include <set>
#include <string>

namespace kvzap::test {

/// A folder that all ranks know, removed by rank 0 once all are done with it.
class SharedFolder {
 public:
  SharedFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "kvzap-XXXXXX").string();
    if (m_comm.is_root() && ::mkdtemp(pattern.data()) == nullptr) pattern.clear();
    m_comm.broadcast(pattern.data(), pattern.size(), 0);
    m_path = pattern;
  }
  ~SharedFolder() {
    m_comm.barrier();
    std::error_code ignored;
    if (m_comm.is_root()) std::filesystem::remove_all(m_path, ignored);
  }
  SharedFolder(const SharedFolder&) = delete;
  SharedFolder& operator=(const SharedFolder&) = delete;

  std::filesystem::path operator/(const std::string& name) const { return m_path / name; }
  std::set<std::string> names() const {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(m_path)) {
      names.insert(entry.path().filename().string());
    }
    return names;
  }

 private:
  Communicator m_comm = Communicator::world();
  std::filesystem::path m_path;
};

#if KVZAP_HAVE_MPI
/// The first `n` ranks of the world.
class FirstRanks {
 public:
  explicit FirstRanks(int n) {
    const Communicator world = Communicator::world();
    MPI_Comm_split(world.mpi(), world.rank() < n ? 0 : MPI_UNDEFINED, 0, &m_comm);
  }
  ~FirstRanks() {
    if (m_comm != MPI_COMM_NULL) MPI_Comm_free(&m_comm);
  }
  FirstRanks(const FirstRanks&) = delete;
  FirstRanks& operator=(const FirstRanks&) = delete;
  bool has_this_rank() const { return m_comm != MPI_COMM_NULL; }
  /// Only where this rank is one of them.
  Communicator communicator() const { return Communicator(m_comm); }

 private:
  MPI_Comm m_comm = MPI_COMM_NULL;
};
#else
/// The one rank that there is.
class FirstRanks {
 public:
  explicit FirstRanks(int) {}
  bool has_this_rank() const { return true; }
  Communicator communicator() const { return Communicator::world(); }
};
#endif

}  // namespace kvzap::test
