// Snapshots are written over older ones while the system's calls fail, or the process dies at one
// of them, for every call on every rank: what is under the file's name must afterwards be the older
// snapshot or the new one, whole. campaign.py starts this program on all numbers of ranks and sums
// up.
//
//   campaign fail FOLDER SCENARIO EVERY   calls that fail, in a loop; on one rank also deaths, by
//   fork campaign kill FOLDER SCENARIO FAULT RANK CALL
//                                         looks at what is in the folder, writes the older snapshot
//                                         again, then the new one, during which the process of one
//                                         rank dies
//
// EVERY n: every n-th call, another one with each fault. Prints "counts: NAME=NUMBER …" and each
// violation; exits with 1 if there is one, with 4 after `kill` if the rank has fewer calls.
#include <sys/wait.h>
#include <unistd.h>

#include <Kokkos_Core.hpp>
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <kvzap/engine/snapshot.hpp>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io_faults.h"
#include "parallel/mpi_session.hpp"

namespace kvzap {
namespace {

namespace fs = std::filesystem;
using Value = bfloat16;
using Cache = KVCache;

constexpr int n_layers = 1;
constexpr int n_heads = 4;
constexpr int head_dim = 16;
constexpr int window = 8;
constexpr std::int64_t older_tokens = 40, context_tokens = 60, newer_tokens = 90;
const EvictionRule rule{0.2f, 0, true};

// Ends what hangs, saying where.
constexpr unsigned patience = 120;  // seconds
constexpr int fell_short = 4;       // exit status
char where[512] = "the start";

extern "C" void say_where(int) {
  const char text[] = "\ncampaign: hangs at ";
  if (::write(2, text, sizeof(text) - 1) < 0 || ::write(2, where, std::strlen(where)) < 0)
    std::_Exit(3);
  std::_Exit(3);
}

/// How a snapshot is written.
struct Scenario {
  std::string name;
  SnapshotOptions options;
  bool with_context;  // and recent queries, logits, ids
  bool in_steps;      // by advance()
};

const std::vector<Scenario>& scenarios() {
  static const std::vector<Scenario> all{
      {"rows", {}, true, true},
      {"map", {SnapshotContent::scores, 6, {}}, false, false},
      {"compressed", {SnapshotContent::all, 4, DType::f32}, true, false},
  };
  return all;
}

float number(std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t d) {
  std::uint64_t state = 0x9e3779b97f4a7c15u;
  for (const std::int64_t part : {a, b, c, d}) {
    state = (state ^ static_cast<std::uint64_t>(part)) * 0xbf58476d1ce4e5b9u;
    state ^= state >> 29;
  }
  return static_cast<float>(state >> 40) / 8388608.0f - 1.0f;
}

void append(Cache& cache, SequenceId sequence, const HeadPartition& partition, int rank,
            std::int64_t from, std::int64_t to) {
  for (int layer = 0; layer < n_layers; ++layer) {
    const auto& heads = partition.heads(layer, rank);
    const Kokkos::View<Value***, Kokkos::LayoutRight, MemorySpace> keys("keys", to - from,
                                                                        heads.size(), head_dim);
    const Kokkos::View<Value***, Kokkos::LayoutRight, MemorySpace> values("values", to - from,
                                                                          heads.size(), head_dim);
    const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> scores("scores", heads.size(),
                                                                         to - from);
    const auto host_keys = Kokkos::create_mirror_view(keys),
               host_values = Kokkos::create_mirror_view(values);
    const auto host_scores = Kokkos::create_mirror_view(scores);
    for (std::size_t h = 0; h < heads.size(); ++h) {
      for (std::int64_t p = from; p < to; ++p) {
        host_scores(h, p - from) = number(1, layer, heads[h], p);
        for (int d = 0; d < head_dim; ++d) {
          host_keys(p - from, h, d) = Value(number(2, layer, heads[h], p * head_dim + d));
          host_values(p - from, h, d) = Value(number(3, layer, heads[h], p * head_dim + d));
        }
      }
    }
    Kokkos::deep_copy(keys, host_keys);
    Kokkos::deep_copy(values, host_values);
    Kokkos::deep_copy(scores, host_scores);
    cache.append(ExecutionSpace{}, sequence, layer, keys, values, scores, rule);
  }
}

std::string bytes_of(const fs::path& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

CacheShape shape_of(const HeadPartition& partition, int rank) {
  CacheShape shape;
  for (int layer = 0; layer < n_layers; ++layer) {
    shape.heads.push_back(static_cast<int>(partition.heads(layer, rank).size()));
  }
  shape.head_dim = head_dim;
  shape.window = window;
  shape.page_rows = 4;
  return shape;
}

/// What a write came to on this rank.
struct Outcome {
  std::string error;  // of AgreedError
  std::string other;  // of anything else that was thrown
  std::vector<std::string> notes;
};

class Campaign {
 public:
  Campaign(fs::path folder, const Communicator& comm)
      : m_comm(comm),
        m_partition(HeadPartition::balanced({{9, 50, 3, 40}}, comm.size())),
        m_cache(DType::bf16, shape_of(m_partition, comm.rank())),
        m_folder(folder / "snapshots"),
        m_references(folder / "references"),
        m_file(m_folder / "cache.h5") {
    m_older = m_cache.add_sequence();
    append(m_cache, m_older, m_partition, comm.rank(), 0, older_tokens);
    m_newer = m_cache.fork(m_older);
    append(m_cache, m_newer, m_partition, comm.rank(), older_tokens, context_tokens);
    m_context = m_cache.checkpoint(m_newer);
    append(m_cache, m_newer, m_partition, comm.rank(), context_tokens, newer_tokens);
    if (comm.is_root()) {
      fs::create_directories(m_folder);
      fs::create_directories(m_references);
    }
    comm.barrier();
  }

  /// Both snapshots as they are without faults; those of an earlier process are kept.
  void make_references(const Scenario& scenario) {
    for (const bool newer : {false, true}) {
      const fs::path file = m_references / (scenario.name + (newer ? "-newer.h5" : "-older.h5"));
      bool exists = false;
      m_comm.agree_on_root([&] { exists = fs::exists(file); });
      if (m_comm.all_reduce_max(exists) == 0) {
        const Outcome outcome = write(scenario, newer, file);
        if (!outcome.error.empty() || !outcome.other.empty()) {
          throw Error("a write without faults fails: " + outcome.error + outcome.other);
        }
        m_comm.barrier();
      }
      (newer ? m_newer_bytes : m_older_bytes) = bytes_of(file);
    }
    expect(
        m_newer_bytes.size() > 100 && m_older_bytes.size() > 100 && m_newer_bytes != m_older_bytes,
        "the two snapshots do not differ");
  }

  /// Every `every`-th call on each rank, another one with each kind of fault, so that all calls are
  /// hit by some. One rank dies too, in processes that it forks.
  void fail_all(const Scenario& scenario, int every) {
    make_references(scenario);
    int phase = 0;
    for (const char* fault : {"eio", "enospc", "eintr", "short", "eio-on", "enospc-on"}) {
      for (int rank = 0; rank < m_comm.size(); ++rank) {
        long call = 1 + phase++ % every;
        while (fail_one(scenario, fault, rank, call)) call += every;
      }
    }
    if (m_comm.size() > 1) return;
    for (const char* fault : {"kill", "torn"}) {
      long call = 1 + phase++ % every;
      while (die_in_child(scenario, fault, call)) call += every;
    }
  }

  /// What an earlier process left, and a write over it. Returns the exit status.
  int look(const Scenario& scenario, const char* fault, int rank, long call) {
    describe(scenario, fault, rank, call);
    make_references(scenario);
    bool exists = false;
    m_comm.agree_on_root([&] { exists = fs::exists(m_file); });
    if (m_comm.all_reduce_max(exists) != 0) look_after_death();
    write_older(scenario, true);
    return report();
  }

  /// Does not return if the rank makes so many calls.
  void die(const Scenario& scenario, const char* fault, int rank, long call) {
    arm(fault, rank, call);
    write(scenario, true, m_file);
    kvzap_io_faults_disarm();
  }

  int report() {
    const std::int64_t violations = m_comm.all_reduce_sum(m_violations);
    if (m_comm.is_root()) {
      std::string line = "counts:";
      for (const auto& [name, count] : m_counts) line += " " + name + "=" + std::to_string(count);
      std::printf("%s violations=%lld\n", line.c_str(), static_cast<long long>(violations));
      std::fflush(stdout);
    }
    return violations == 0 ? 0 : 1;
  }

 private:
  Outcome write(const Scenario& scenario, bool newer, const fs::path& file) {
    Outcome outcome;
    try {
      const SnapshotInfo info = info_of(scenario, newer);
      const SequenceId sequence = newer ? m_newer : m_older;
      if (!scenario.with_context) {
        outcome.notes =
            write_snapshot(file, m_cache, sequence, m_partition, m_comm, info, scenario.options);
        return outcome;
      }
      const auto writing = begin_snapshot(file, m_cache, sequence, m_partition, m_comm, info,
                                          scenario.options, newer ? &m_context : nullptr);
      for (int step = 0; scenario.in_steps && step < 3 && !writing->advance(); ++step)
        ::usleep(300);
      writing->finish();
      outcome.notes = writing->notes();
    } catch (const AgreedError& error) {
      outcome.error = error.what();
    } catch (const std::exception& error) {
      outcome.other = error.what();
    }
    return outcome;
  }

  SnapshotInfo info_of(const Scenario& scenario, bool newer) const {
    SnapshotInfo info;
    info.model = "model";
    info.model_hash = "0123";
    info.kvzap_version = "test";
    info.created = "2026-01-01T00:00:00Z";
    info.prune = "kvzap";
    info.threshold = rule.threshold;
    info.options = R"({"seed": 1})";
    info.token_ids.assign(newer ? newer_tokens : older_tokens, 7);
    info.context_tokens = newer ? context_tokens : older_tokens;
    if (!scenario.with_context) return info;
    info.logits.assign(100, 0.5f);
    info.state["steps"] = 3;
    for (int layer = 0; layer < n_layers; ++layer) {
      const std::size_t heads = m_partition.heads(layer, m_comm.rank()).size();
      info.recent_queries.push_back({newer ? newer_tokens - 4 : older_tokens - 4, 4,
                                     std::vector<float>(2 * heads * 4 * head_dim, 0.25f)});
    }
    return info;
  }

  void arm(const char* fault, int rank, long call) {
    m_comm.barrier();
    if (m_comm.rank() == rank && kvzap_io_faults_arm(m_folder.c_str(), fault, call) != 0) {
      std::fprintf(stderr, "campaign: no fault %s\n", fault);
      std::_Exit(2);
    }
    m_comm.barrier();
  }

  // One failing call. Returns whether the rank makes so many.
  bool fail_one(const Scenario& scenario, const char* fault, int rank, long call) {
    describe(scenario, fault, rank, call);
    write_older(scenario, false);
    arm(fault, rank, call);
    const Outcome outcome = write(scenario, true, m_file);
    kvzap_io_faults_disarm();
    std::string hit = m_comm.rank() == rank ? kvzap_io_faults_hit() : "";
    const bool enough =
        m_comm.all_reduce_max(m_comm.rank() == rank && kvzap_io_faults_calls() >= call) != 0;
    share(hit, rank);
    if (hit.empty()) {
      expect(outcome.error.empty() && outcome.other.empty(),
             "error without fault: " + outcome.error + outcome.other);
      return enough;
    }
    describe(scenario, fault, rank, call, hit);
    count("faults");
    count(outcome.error.empty() ? "survived" : "failed");
    expect(outcome.other.empty(), "not an AgreedError: " + outcome.other);
    std::string of_root = outcome.error;
    share(of_root, 0);
    expect(outcome.error == of_root,
           "ranks differ: '" + outcome.error + "', on rank 0: '" + of_root + "'");
    if (!outcome.error.empty()) {
      expect(outcome.error.find(m_file.string()) != std::string::npos,
             "file not named: " + outcome.error);
    }
    const Found found = read_back();
    if (m_comm.is_root()) {
      // What cannot be told to the disk is the name alone: see write_snapshot.
      const bool only_folder = hit.substr(hit.find(' ') + 1) == m_folder.string();
      if (outcome.error.empty()) {
        expect(found == Found::newer, "written without error, but it is not the new snapshot");
      } else {
        if (found == Found::newer) count("new_though_failed");
        expect(found == Found::older || only_folder,
               "failed, yet the older snapshot is replaced: " + outcome.error);
      }
      // A write that cannot remove its file has no other way.
      const std::size_t left = temporaries();
      const bool of_removal = hit.rfind("unlink", 0) == 0 || hit.rfind("remove", 0) == 0;
      expect(left <= (of_removal ? 1 : 0), "a temporary file is left");
    }
    expect_same_on_ranks(outcome.error.empty());
    return true;
  }

  bool die_in_child(const Scenario& scenario, const char* fault, long call) {
    describe(scenario, fault, 0, call);
    write_older(scenario, true);
    std::fflush(nullptr);
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(patience);
      if (kvzap_io_faults_arm(m_folder.c_str(), fault, call) != 0) std::_Exit(2);
      const Outcome outcome = write(scenario, true, m_file);
      std::_Exit(outcome.error.empty() && outcome.other.empty() ? 0 : 1);
    }
    int status = 0;
    if (child < 0 || ::waitpid(child, &status, 0) != child) throw Error("no child process");
    if (WIFEXITED(status)) {
      expect(WEXITSTATUS(status) == 0, "the child did not die, and failed");
      return false;
    }
    expect(WTERMSIG(status) == SIGKILL,
           "the child died of signal " + std::to_string(WTERMSIG(status)));
    look_after_death();
    return true;
  }

  void look_after_death() {
    count("faults");
    count("deaths");
    const Found found = read_back();
    count(found == Found::newer ? "deaths_new" : "deaths_old");
    if (!m_comm.is_root()) return;
    const std::size_t left = temporaries();
    if (left != 0) count("deaths_with_temporary");
    expect(left <= 1, "more than one temporary file is left");
  }

  // mpirun may return while ranks that it has killed are still ending. A temporary file's name ends
  // with its process and a number.
  static void wait_for_end_of_writer(const std::string& name) {
    const std::size_t last = name.rfind('-'), before = name.rfind('-', last - 1);
    const auto process = static_cast<pid_t>(std::atol(name.c_str() + before + 1));
    for (int i = 0; i < 1000 && process > 0 && ::kill(process, 0) == 0; ++i) {
      std::ifstream stat("/proc/" + std::to_string(process) + "/stat");
      const std::string text{std::istreambuf_iterator<char>(stat), {}};
      if (text.find(") Z ") != std::string::npos) return;  // ended, and nobody has asked how
      ::usleep(10000);
    }
  }

  // Later writes work, and tell what killed ones have left.
  void write_older(const Scenario& scenario, bool may_have_left) {
    m_comm.barrier();
    std::vector<std::string> left;
    if (m_comm.is_root()) {
      for (const auto& entry : fs::directory_iterator(m_folder)) {
        if (entry.path() != m_file) left.push_back(entry.path().string());
      }
      for (const std::string& name : left) wait_for_end_of_writer(name);
    }
    const Outcome outcome = write(scenario, false, m_file);
    expect(outcome.error.empty() && outcome.other.empty(),
           "a later write fails: " + outcome.error + outcome.other);
    m_comm.barrier();
    if (!m_comm.is_root()) return;
    expect(bytes_of(m_file) == m_older_bytes, "a later write gives another file");
    expect(temporaries() == 0, "a later write leaves a temporary file");
    if (!may_have_left) return;
    expect(outcome.notes.size() == left.size(), std::to_string(left.size()) +
                                                    " temporary files were left, and " +
                                                    std::to_string(outcome.notes.size()) + " told");
    for (const std::string& name : left) {
      expect(std::any_of(outcome.notes.begin(), outcome.notes.end(),
                         [&](const std::string& note) {
                           return note.find("removed " + name) != std::string::npos;
                         }),
             "nothing is said of " + name);
    }
  }

  enum class Found { older, newer, neither };

  // What is under the file's name: read by all ranks, and compared byte by byte. Collective; rank
  // 0's counts.
  Found read_back() {
    m_comm.barrier();
    Found found = Found::neither;
    if (m_comm.is_root()) {
      const std::string bytes = fs::exists(m_file) ? bytes_of(m_file) : "";
      if (bytes == m_older_bytes) found = Found::older;
      if (bytes == m_newer_bytes) found = Found::newer;
      if (found == Found::neither) {
        count("lost");
        expect(false, bytes.empty() ? "the snapshot is missing"
                                    : "neither the older nor the new snapshot");
      }
    }
    std::int64_t shared = static_cast<std::int64_t>(found);
    m_comm.broadcast(&shared, sizeof(shared), 0);
    found = static_cast<Found>(shared);
    try {
      std::optional<SnapshotReader> reader;
      m_comm.agree([&] {
        reader.emplace(m_file);
        const std::int64_t tokens = found == Found::newer ? newer_tokens : older_tokens;
        if (reader->header().tokens != tokens) throw Error("it has other tokens");
        if (!m_comm.is_root()) return;
        for (const std::string& damage : reader->verify()) throw Error(damage);
      });
      if (reader->header().content == SnapshotContent::all) {
        const auto loaded = load_snapshot(*reader, m_cache, m_partition, m_comm);
        m_cache.free_sequence(loaded.sequence);
      }
    } catch (const std::exception& error) {
      if (m_comm.is_root()) count("unreadable");
      expect(false, std::string("unreadable: ") + error.what());
    }
    m_comm.barrier();
    return found;
  }

  std::size_t temporaries() const {
    std::size_t n = 0;
    for (const auto& entry : fs::directory_iterator(m_folder)) n += entry.path() != m_file;
    return n;
  }

  void share(std::string& text, int root) const {
    std::int64_t length = static_cast<std::int64_t>(text.size());
    m_comm.broadcast(&length, sizeof(length), root);
    text.resize(static_cast<std::size_t>(length));
    m_comm.broadcast(text.data(), text.size(), root);
  }

  void expect_same_on_ranks(bool value) {
    const std::int64_t sum = m_comm.all_reduce_sum(std::int64_t{value});
    expect(sum == 0 || sum == m_comm.size(), "some ranks fail and others do not");
  }

  void describe(const Scenario& scenario, const char* fault, int rank, long call,
                const std::string& hit = "") {
    std::snprintf(where, sizeof(where), "%s, %d ranks: %s at call %ld of rank %d %s",
                  scenario.name.c_str(), m_comm.size(), fault, call, rank, hit.c_str());
    ::alarm(patience);
  }

  void expect(bool holds, const std::string& what) {
    if (holds) return;
    constexpr int shown = 20;
    if (m_violations++ < shown) {
      std::fprintf(stderr, "campaign: rank %d: %s: %s\n", m_comm.rank(), where, what.c_str());
    }
  }

  void count(const std::string& name) { ++m_counts[name]; }

  const Communicator& m_comm;
  HeadPartition m_partition;
  Cache m_cache;
  SequenceId m_older = -1, m_newer = -1;
  Cache::Checkpoint m_context;
  fs::path m_folder, m_references, m_file;
  std::string m_older_bytes, m_newer_bytes;
  std::map<std::string, std::int64_t> m_counts{{"faults", 0}, {"lost", 0}, {"unreadable", 0}};
  std::int64_t m_violations = 0;
};

int run(const std::vector<std::string>& arguments) {
  const Communicator comm = Communicator::world();
  const std::size_t n = arguments.size();
  if ((n == 4 && arguments[0] == "fail") || (n == 6 && arguments[0] == "kill")) {
    Campaign campaign(arguments[1], comm);
    for (const Scenario& scenario : scenarios()) {
      if (scenario.name != arguments[2]) continue;
      if (n == 4) {
        campaign.fail_all(scenario, std::max(1, std::atoi(arguments[3].c_str())));
        return campaign.report();
      }
      const int rank = std::atoi(arguments[4].c_str());
      const long call = std::atol(arguments[5].c_str());
      const int status = campaign.look(scenario, arguments[3].c_str(), rank, call);
      if (status != 0) return status;
      campaign.die(scenario, arguments[3].c_str(), rank, call);
      return fell_short;
    }
  }
  std::fprintf(stderr, "usage: see campaign.cpp\n");
  return 2;
}

}  // namespace
}  // namespace kvzap

int main(int argc, char** argv) {
  std::signal(SIGALRM, kvzap::say_where);
  ::alarm(kvzap::patience);
  const kvzap::parallel::MpiSession mpi(argc, argv);
  Kokkos::initialize();
  int status = 1;
  try {
    status = kvzap::run(std::vector<std::string>(argv + 1, argv + argc));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "campaign: %s: %s\n", kvzap::where, error.what());
    kvzap::Communicator::world().abort(1);
  }
  Kokkos::finalize();
  return status;
}
