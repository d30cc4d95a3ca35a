#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <vector>

#include "files/temporary_file.hpp"
#include "unit/temporary_folder.hpp"

namespace kvzap::files {
namespace {

namespace fs = std::filesystem;

std::set<std::string> names(const fs::path& folder) {
  std::set<std::string> result;
  for (const auto& entry : fs::directory_iterator(folder)) {
    result.insert(entry.path().filename().string());
  }
  return result;
}

/// A child process that only waits, until it is killed.
class Child {
 public:
  Child() : m_id(::fork()) {
    while (m_id == 0) ::pause();
  }
  ~Child() { kill(); }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  pid_t id() const { return m_id; }
  void kill() {
    if (m_killed) return;
    ::kill(m_id, SIGKILL);
    ::waitpid(m_id, nullptr, 0);
    m_killed = true;
  }

 private:
  pid_t m_id;
  bool m_killed = false;
};

class TemporaryFileTest : public ::testing::Test {
 protected:
  /// What a process would have left behind.
  fs::path leave(const std::string& node, std::int64_t process) const {
    const std::string middle = node.empty() ? "" : node + "-";
    const std::string name = "cache.h5.tmp-" + middle + std::to_string(process) + "-0";
    m_folder.write(name, "rows");
    return m_folder.path() / name;
  }
  static void make_old(const fs::path& file) {
    fs::last_write_time(file, fs::last_write_time(file) - std::chrono::hours(25));
  }
  std::vector<std::string> create_and_clean() const {
    TemporaryFile file(m_target, m_comm);
    file.create();
    return file.remove_leftovers();
  }

  const test::TemporaryFolder m_folder;
  const fs::path m_target = m_folder.path() / "cache.h5";
  const Communicator m_comm = Communicator::self();
};

TEST_F(TemporaryFileTest, IsRemovedUnlessItIsMoved) {
  {
    TemporaryFile file(m_target, m_comm);
    file.create();
    EXPECT_EQ(names(m_folder.path()).size(), 1u);
  }
  EXPECT_TRUE(names(m_folder.path()).empty());
  TemporaryFile file(m_target, m_comm);
  file.create();
  file.move_to_target();
  EXPECT_EQ(names(m_folder.path()), std::set<std::string>{"cache.h5"});
}

TEST_F(TemporaryFileTest, ReachesTheDiskBeforeItsNameDoes) {
  std::vector<std::string> calls;
  const DurableCalls system = DurableCalls::of_system();
  fs::path temporary;
  TemporaryFile file(m_target, m_comm,
                     {[&](const fs::path& path) {
                        EXPECT_EQ(path, temporary);
                        calls.emplace_back("file");
                        system.sync_file(path);
                      },
                      [&](const fs::path& from, const fs::path& to) {
                        EXPECT_EQ(from, temporary);
                        EXPECT_EQ(to, m_target);
                        calls.emplace_back("rename");
                        system.rename(from, to);
                      },
                      [&](const fs::path& path) {
                        EXPECT_EQ(path, m_folder.path());
                        calls.emplace_back("folder");
                        system.sync_folder(path);
                      }});
  file.create();
  temporary = file.path();
  file.move_to_target();
  EXPECT_EQ(calls, (std::vector<std::string>{"file", "rename", "folder"}));
}

TEST_F(TemporaryFileTest, DoesNotReplaceTheTargetWithWhatIsNotOnTheDisk) {
  m_folder.write("cache.h5", "older");
  DurableCalls calls = DurableCalls::of_system();
  calls.sync_file = [](const fs::path&) {
    throw system_error("cannot be brought to the disk", EIO);
  };
  {
    TemporaryFile file(m_target, m_comm, calls);
    file.create();
    test::expect_error([&] { file.move_to_target(); }, {"cache.h5", "disk"});
  }
  EXPECT_EQ(names(m_folder.path()), std::set<std::string>{"cache.h5"});
  std::ifstream stream(m_target);
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(stream), {}), "older");
}

TEST_F(TemporaryFileTest, TellsThatItsNameDidNotReachTheDisk) {
  DurableCalls calls = DurableCalls::of_system();
  calls.sync_folder = [](const fs::path&) { throw system_error("no name", EIO); };
  TemporaryFile file(m_target, m_comm, calls);
  file.create();
  test::expect_error([&] { file.move_to_target(); }, {"cache.h5", "no name"});
  EXPECT_EQ(names(m_folder.path()), std::set<std::string>{"cache.h5"});
}

TEST_F(TemporaryFileTest, RemovesWhatKilledRunsLeft) {
  Child child;
  const fs::path left = leave(node_name(), child.id());
  EXPECT_TRUE(create_and_clean().empty());  // it is alive
  EXPECT_TRUE(fs::exists(left));
  child.kill();
  const std::vector<std::string> notes = create_and_clean();
  EXPECT_FALSE(fs::exists(left));
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_NE(notes[0].find("removed " + left.string()), std::string::npos) << notes[0];
  EXPECT_TRUE(create_and_clean().empty());
}

// The whole way: a process that is killed between create() and move_to_target().
TEST_F(TemporaryFileTest, RemovesTheFileOfAWriterThatWasKilled) {
  std::array<int, 2> ready{};
  ASSERT_EQ(::pipe(ready.data()), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    TemporaryFile file(m_target, m_comm);
    file.create();
    const bool told = ::write(ready[1], "x", 1) == 1;
    while (told) ::pause();
    ::_exit(1);
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  EXPECT_TRUE(create_and_clean().empty());
  EXPECT_EQ(names(m_folder.path()).size(), 1u);
  ::kill(child, SIGKILL);
  // It has ended, and yet has its process id until it is waited for, which not everybody does.
  siginfo_t ended{};
  ::waitid(P_PID, child, &ended, WEXITED | WNOWAIT);
  EXPECT_EQ(::kill(child, 0), 0);
  EXPECT_EQ(create_and_clean().size(), 1u);
  EXPECT_TRUE(names(m_folder.path()).empty());
  ::waitpid(child, nullptr, 0);
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST_F(TemporaryFileTest, OfAnotherNodeOnlyTimeTells) {
  for (const std::string node : {"elsewhere-1.site", ""}) {
    Child child;  // process ids of the other node mean nothing here
    const fs::path dead = leave(node, child.id());
    child.kill();
    std::vector<std::string> notes = create_and_clean();
    EXPECT_TRUE(fs::exists(dead));
    ASSERT_EQ(notes.size(), 1u);
    EXPECT_NE(notes[0].find("may be alive"), std::string::npos) << notes[0];
    make_old(dead);
    notes = create_and_clean();
    EXPECT_FALSE(fs::exists(dead));
    ASSERT_EQ(notes.size(), 1u);
    EXPECT_NE(notes[0].find("removed"), std::string::npos) << notes[0];
  }
}

TEST_F(TemporaryFileTest, OldFilesOfLiveProcessesAreTold) {
  const fs::path mine = leave(node_name(), ::getpid());
  make_old(mine);
  const std::vector<std::string> notes = create_and_clean();
  EXPECT_TRUE(fs::exists(mine));
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_NE(notes[0].find(std::to_string(::getpid())), std::string::npos) << notes[0];
}

TEST_F(TemporaryFileTest, ALinkStandsForWhatItLeadsTo) {
  const fs::path folder = m_folder.path();
  fs::create_directory(folder / "there");
  fs::create_symlink("there/second", folder / "first");  // relative to where it is
  fs::create_symlink(folder / "there" / "rows", folder / "there" / "second");
  EXPECT_EQ(target_of_links(folder / "first"), folder / "there" / "rows");
  EXPECT_EQ(target_of_links(folder / "none"), folder / "none");
  for (const char* text : {"new", "newer"}) {  // there is none, there is one
    write_text(folder / "first", text);
    std::ifstream stream(folder / "there" / "rows");
    EXPECT_EQ(std::string(std::istreambuf_iterator<char>(stream), {}), text);
    EXPECT_TRUE(fs::is_symlink(folder / "first"));
    EXPECT_EQ(names(folder / "there"), (std::set<std::string>{"rows", "second"}));
    EXPECT_EQ(names(folder), (std::set<std::string>{"first", "there"}));
  }
  fs::create_symlink("circle", folder / "circle");
  EXPECT_THROW(target_of_links(folder / "circle"), Error);
  EXPECT_THROW(write_text(folder / "circle", "text"), Error);
}

TEST_F(TemporaryFileTest, ReplaceFileKeepsTheOldOneIfWritingFails) {
  const fs::path file = m_folder.path() / "report";
  write_text(file, "old");
  const auto refuse = [&](const std::function<void(std::ostream&)>& write, const char* message) {
    try {
      write_file(file, "--json", write);
      ADD_FAILURE() << message;
    } catch (const Error& error) {
      EXPECT_EQ(std::string(error.what()), "--json " + file.string() + ": " + message);
      // Other ranks do not throw it.
      EXPECT_EQ(dynamic_cast<const AgreedError*>(&error), nullptr);
    }
    std::string text;
    std::ifstream(file) >> text;
    EXPECT_EQ(text, "old");
    EXPECT_EQ(std::distance(fs::directory_iterator(m_folder.path()), {}), 1);
  };
  refuse([](std::ostream& stream) { stream.setstate(std::ios::badbit); },
         "cannot be written: Input/output error");
  refuse(
      [](std::ostream& stream) {
        stream << "half";
        throw Error("no more");
      },
      "no more");
}

TEST_F(TemporaryFileTest, ChecksWhetherAFileCanBeReplaced) {
  const fs::path folder = m_folder.path();
  EXPECT_TRUE(check_file_writable(folder / "report", "--json").empty());
  EXPECT_TRUE(fs::is_empty(folder));
  std::ofstream(folder / ("report.tmp-" + node_name() + "-999999999-0")) << "left";
  EXPECT_EQ(check_file_writable(folder / "report", "--json").size(), 1u);
  EXPECT_TRUE(fs::is_empty(folder));
  for (const fs::path& target : {folder / "none" / "x", folder}) {
    try {
      check_file_writable(target, "--json");
      ADD_FAILURE() << target;
    } catch (const Error& error) {
      EXPECT_EQ(std::string(error.what()).find("--json " + target.string() + ": "), 0u);
    }
  }
}

TEST_F(TemporaryFileTest, KeepsTheModeOfTheFileThatItReplaces) {
  const fs::path file = m_folder.path() / "report.json";
  const auto mode = [&] { return fs::status(file).permissions(); };
  using fs::perms;
  for (const perms wanted : {perms::owner_read | perms::owner_write,
                             perms::owner_read | perms::owner_write | perms::group_read,
                             perms::owner_read, perms::owner_all | perms::others_read}) {
    m_folder.write("report.json", "");
    fs::permissions(file, wanted);
    replace_file(file, "--json", [&](const fs::path& path) {
      EXPECT_EQ(fs::status(path).permissions() & (perms::group_all | perms::others_all),
                perms::none);
      std::ofstream(path) << "an answer";
    });
    EXPECT_EQ(mode(), wanted);
    fs::remove(file);
  }
  const mode_t mask = ::umask(027);
  write_text(file, "new");
  ::umask(mask);
  EXPECT_EQ(mode(), perms::owner_read | perms::owner_write | perms::group_read);
}

TEST_F(TemporaryFileTest, MakesAFolderWholeOrNotAtAll) {
  const fs::path folder = m_folder.path() / "model";
  const auto fill = [](const fs::path& made) { std::ofstream(made / "config.json") << "{}"; };
  EXPECT_THROW(make_folder(folder,
                           [&](const fs::path& made) {
                             fill(made);
                             throw Error("the disk is full");
                           }),
               Error);
  EXPECT_TRUE(fs::is_empty(m_folder.path()));
  // What a killed process has left.
  const fs::path left = m_folder.path() / ("model.tmp-" + node_name() + "-999999999-0");
  fs::create_directory(left);
  fill(left);
  make_folder(folder, fill);
  EXPECT_EQ(names(m_folder.path()), std::set<std::string>{"model"});
  EXPECT_EQ(names(folder), std::set<std::string>{"config.json"});
  EXPECT_THROW(make_folder(folder, fill), Error);
  EXPECT_EQ(names(m_folder.path()), std::set<std::string>{"model"});
}

TEST_F(TemporaryFileTest, LeavesOtherFilesAlone) {
  std::set<std::string> others;
  for (const std::string name :
       {"cache.h5", "cache.h5.tmp", "cache.h5.tmp-", "cache.h5.tmp-a-b-c", "cache.h5.tmp-1-", "x",
        "cache.h5.tmp-0-0", "other.h5.tmp-elsewhere-99999999-0",
        "cache.h5.tmp-99999999999999999-0"}) {
    m_folder.write(name, "");
    make_old(m_folder.path() / name);
    others.insert(name);
  }
  EXPECT_TRUE(create_and_clean().empty());
  EXPECT_EQ(names(m_folder.path()), others);
}

}  // namespace
}  // namespace kvzap::files
