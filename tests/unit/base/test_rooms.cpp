// Rooms (folders of src, with their public headers) include one another in one direction: that of
// the lists in cmake/KvzapLibraries.cmake. Each room has its own namespace.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "source_dir.hpp"

namespace {

namespace fs = std::filesystem;

const fs::path source = kvzap::test::source_dir();

/// The rooms of public headers. Headers that are not listed belong to the room with a source of
/// their name.
const std::map<std::string, std::string> rooms_of_headers = {
    {"core/array_view", "base"},
    {"core/attend", "attention"},
    {"core/attention_mass", "attention"},
    {"core/cache", "cache"},
    {"core/cache_shape", "cache"},
    {"core/eviction", "cache"},
    {"core/keep_list", "cache"},
    {"core/ragged_layer", "cache"},
    {"core/read_pages", "attention"},
    {"core/score", "linalg"},
    {"core/view_checks", "base"},
    {"engine/external_layer", "engine"},
    {"engine/token_draw", "engine"},
    {"engine/policies", "policy"},
    {"engine/policy_parameters", "policy"},
    {"engine/policy_text", "policy"},
    {"engine/repeat_prompt", "policy"},
    {"engine/scorer", "policy"},
    {"engine/snapshot", "io"},
    {"engine/step_observer", "engine"},
    {"engine/value_merger", "policy"},
    {"lab/pairs", "train"},
    {"lab/tasks", "eval"},
    {"server/histogram", "server"},
    {"server/protocol", "server"},
    {"server/request", "server"},
};

std::string read(const fs::path& file) {
  std::ifstream stream(file);
  std::ostringstream text;
  text << stream.rdbuf();
  return text.str();
}

/// A room's component, and its number from below.
struct Place {
  std::string component;
  int number;
};

const std::map<std::string, Place>& places() {
  static const std::map<std::string, Place> all = [] {
    std::map<std::string, Place> found;
    const std::string cmake = read(source / "cmake/KvzapLibraries.cmake");
    const std::regex lists(R"(set\(kvzap_(\w+)_rooms ([\w ]+)\))");
    for (std::sregex_iterator i(cmake.begin(), cmake.end(), lists), end; i != end; ++i) {
      std::istringstream rooms((*i)[2].str());
      for (std::string room; rooms >> room;) {
        found[room] = {(*i)[1].str(), static_cast<int>(found.size())};
      }
    }
    return found;
  }();
  return all;
}

/// Returns the room of the public header kvzap/COMPONENT/NAME.hpp, or "".
std::string room_of_header(const std::string& component, const std::string& name) {
  const auto listed = rooms_of_headers.find(component + "/" + name);
  if (listed != rooms_of_headers.end()) return listed->second;
  for (const auto& [room, place] : places()) {
    if (place.component == component && fs::exists(source / "src" / room / (name + ".cpp"))) {
      return room;
    }
  }
  return "";
}

struct File {
  std::string name;
  std::string room;
  std::string text;
};

/// The files of src, and the public headers, that belong to rooms.
std::vector<File> files_of_rooms() {
  std::vector<File> files;
  for (const char* folder : {"src", "include"}) {
    for (const auto& entry : fs::recursive_directory_iterator(source / folder)) {
      const fs::path& path = entry.path();
      if (path.extension() != ".cpp" && path.extension() != ".hpp") continue;
      if (path.parent_path() == source / "include/kvzap") continue;  // a component's headers in one
      const std::string room =
          folder == std::string("src")
              ? fs::relative(path, source / folder).begin()->string()
              : room_of_header(path.parent_path().filename().string(), path.stem().string());
      files.push_back({fs::relative(path, source).string(), room, read(path)});
    }
  }
  return files;
}

/// The groups of the pattern's matches in a text.
std::vector<std::smatch> matches(const std::string& text, const std::regex& pattern) {
  return {std::sregex_iterator(text.begin(), text.end(), pattern), std::sregex_iterator()};
}

TEST(Rooms, HaveEveryFile) {
  const std::vector<File> files = files_of_rooms();
  ASSERT_GE(places().size(), 15u);
  ASSERT_GE(files.size(), 400u);
  for (const File& file : files) {
    EXPECT_EQ(places().count(file.room), 1u)
        << file.name << " has no room: list it in rooms_of_headers or KvzapLibraries.cmake";
  }
  for (const auto& [header, room] : rooms_of_headers) {
    EXPECT_TRUE(fs::exists(source / "include/kvzap" / (header + ".hpp"))) << header;
    EXPECT_EQ(places().at(room).component, header.substr(0, header.find('/'))) << header;
  }
}

TEST(Rooms, IncludeEarlierRoomsAlone) {
  const std::regex include(R"(#include ["<](?:kvzap/)?(\w+)/(?:\w+/)*(\w+)\.hpp[">])");
  for (const File& file : files_of_rooms()) {
    for (const std::smatch& found : matches(file.text, include)) {
      const bool is_public = found.str().find("kvzap/") != std::string::npos;
      const std::string room =
          is_public ? room_of_header(found[1].str(), found[2].str()) : found[1].str();
      const auto place = places().find(room);
      if (place == places().end()) continue;  // of another project
      EXPECT_LE(place->second.number, places().at(file.room).number)
          << file.name << " of room " << file.room << ": " << found.str() << " of room " << room;
    }
  }
}

TEST(Rooms, OpenTheirOwnNamespaceAlone) {
  const std::regex opening(R"(\n(?:inline )?namespace (?:kvzap::)?(\w+)[\w:]* \{)");
  for (const File& file : files_of_rooms()) {
    const bool is_public = file.name.rfind("include/", 0) == 0;
    for (const std::smatch& found : matches(file.text, opening)) {
      const std::string name = found[1].str();
      if (name == "kvzap" || name == file.room) continue;
      const auto place = places().find(name);
      EXPECT_TRUE(is_public && place != places().end() &&
                  place->second.component == places().at(file.room).component)
          << file.name << " opens kvzap::" << name;
    }
  }
}

/// kvzap/core.hpp has every header of the component.
TEST(Rooms, CoreHeaderIncludesItsComponent) {
  const fs::path include = kvzap::test::source_dir() / "include/kvzap";
  const std::string text = read(include / "core.hpp");
  int headers = 0;
  for (const auto& entry : fs::directory_iterator(include / "core")) {
    const std::string name = entry.path().filename().string();
    EXPECT_NE(text.find("#include <kvzap/core/" + name + ">\n"), std::string::npos) << name;
    ++headers;
  }
  EXPECT_GT(headers, 10);
}

}  // namespace
