// The folders of src and of public headers include one another in one direction: that of the
// components in cmake/KvzapLibraries.cmake. Each folder of src has its own namespace.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace {

namespace fs = std::filesystem;
using Graph = std::map<std::string, std::set<std::string>>;

std::string read(const fs::path& file) {
  std::ifstream stream(file);
  std::ostringstream text;
  text << stream.rdbuf();
  return text.str();
}

std::vector<std::string> words(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> all;
  for (std::string word; stream >> word;) all.push_back(word);
  return all;
}

/// {room or component: number of its component, from below}.
std::map<std::string, int> levels(const fs::path& source) {
  const std::string cmake = read(source / "cmake/KvzapLibraries.cmake");
  std::map<std::string, int> found;
  const std::regex rooms(R"(set\(kvzap_(\w+)_rooms ([\w ]+)\))");
  int level = 0;
  for (std::sregex_iterator i(cmake.begin(), cmake.end(), rooms), end; i != end; ++i, ++level) {
    found["kvzap/" + (*i)[1].str()] = level;
    for (const std::string& room : words((*i)[2].str())) found[room] = level;
  }
  return found;
}

/// The first group of the pattern's matches in each folder's files.
Graph matches(const fs::path& root, const std::string& prefix,
              const std::map<std::string, int>& known, const std::regex& pattern) {
  Graph graph;
  for (const auto& entry : fs::recursive_directory_iterator(root)) {
    const std::string extension = entry.path().extension().string();
    if (extension != ".cpp" && extension != ".hpp") continue;
    const std::string folder = prefix + fs::relative(entry.path(), root).begin()->string();
    if (known.count(folder) == 0) continue;
    const std::string text = read(entry.path());
    for (std::sregex_iterator i(text.begin(), text.end(), pattern), end; i != end; ++i) {
      graph[folder].insert((*i)[1].str());
    }
  }
  return graph;
}

/// What each folder's files include of others: rooms as "cache", public headers as "kvzap/core".
Graph includes(const fs::path& root, const std::string& prefix,
               const std::map<std::string, int>& known) {
  Graph graph;
  const std::regex include(R"(#include ["<]((?:kvzap/)?\w+)/[^">]+[">])");
  for (const auto& [folder, others] : matches(root, prefix, known, include)) {
    for (const std::string& other : others) {
      if (other != folder && known.count(other) != 0) graph[folder].insert(other);
    }
  }
  return graph;
}

/// The namespaces that each folder's files open: "cache" for kvzap::cache, "kvzap" for kvzap alone.
Graph namespaces(const fs::path& root, const std::string& prefix,
                 const std::map<std::string, int>& known) {
  return matches(root, prefix, known,
                 std::regex(R"(\n(?:inline )?namespace (?:kvzap::)?(\w+)[\w:]* \{)"));
}

TEST(Rooms, IncludeComponentsBelowAlone) {
  const fs::path source = KVZAP_SOURCE_DIR;
  const auto level = levels(source);
  ASSERT_GE(level.size(), 15u);
  Graph graph = includes(source / "src", "", level);
  graph.merge(includes(source / "include/kvzap", "kvzap/", level));
  ASSERT_GE(graph.size(), 12u);
  for (const auto& [folder, others] : graph) {
    for (const std::string& other : others) {
      EXPECT_LE(level.at(other), level.at(folder)) << folder << " includes " << other;
    }
  }
}

TEST(Rooms, OpenTheirOwnNamespaceAlone) {
  const fs::path source = KVZAP_SOURCE_DIR;
  const auto level = levels(source);
  const Graph rooms = namespaces(source / "src", "", level);
  ASSERT_GE(rooms.size(), 15u);
  for (const auto& [room, opened] : rooms) {
    for (const std::string& name : opened) {
      EXPECT_TRUE(name == room || name == "kvzap") << "src/" << room << " opens kvzap::" << name;
    }
  }
  for (const auto& [component, opened] : namespaces(source / "include/kvzap", "kvzap/", level)) {
    for (const std::string& name : opened) {
      if (name == "kvzap") continue;
      const auto room = level.find(name);
      EXPECT_TRUE(room != level.end() && room->second == level.at(component))
          << "include/" << component << " opens kvzap::" << name;
    }
  }
}

TEST(Rooms, IncludeOneAnotherWithoutCycles) {
  const fs::path source = KVZAP_SOURCE_DIR;
  const auto level = levels(source);
  // Public headers of a component are its rooms' own.
  Graph graph;
  for (const auto& [folder, others] : includes(source / "src", "", level)) {
    for (const std::string& other : others) {
      if (other.rfind("kvzap/", 0) != 0) graph[folder].insert(other);
    }
  }
  std::set<std::string> done;
  std::vector<std::string> path;
  const std::function<void(const std::string&)> visit = [&](const std::string& room) {
    const auto begin = std::find(path.begin(), path.end(), room);
    if (begin != path.end()) {
      std::string cycle;
      for (auto i = begin; i != path.end(); ++i) cycle += *i + " → ";
      ADD_FAILURE() << cycle << room;
      return;
    }
    if (done.count(room) != 0) return;
    path.push_back(room);
    for (const std::string& other : graph[room]) visit(other);
    path.pop_back();
    done.insert(room);
  };
  for (const auto& [room, unused] : level) visit(room);
}

}  // namespace
