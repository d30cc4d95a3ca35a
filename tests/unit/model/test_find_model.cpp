#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <string>

#include "model/find_model.hpp"
#include "unit/temporary_folder.hpp"

namespace kvzap::model {
namespace {

namespace fs = std::filesystem;
using test::TemporaryFolder;

/// Sets an environment variable while it exists.
class Variable {
 public:
  Variable(const char* name, const std::string& value) : m_name(name) {
    if (const char* before = ::getenv(name)) m_before = before;
    m_was_set = ::getenv(name) != nullptr;
    ::setenv(name, value.c_str(), 1);
  }
  ~Variable() { m_was_set ? ::setenv(m_name, m_before.c_str(), 1) : ::unsetenv(m_name); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* m_name;
  std::string m_before;
  bool m_was_set = false;
};

TEST(FindModel, GoesFromFilesToTheirFolder) {
  TemporaryFolder folder;
  const std::string model = folder.path().string();
  for (const char* name : {"config.json", "model.safetensors", "model.safetensors.index.json"}) {
    folder.write(name, "{}");
    EXPECT_EQ(find_model(model + "/" + name), model);
  }
  EXPECT_EQ(find_model(model), model);
  folder.write("notes.txt", "");
  EXPECT_EQ(find_model(model + "/notes.txt"), model + "/notes.txt");
  EXPECT_EQ(find_model(model + "/none"), model + "/none");
  const Variable home("HOME", model);
  EXPECT_EQ(find_model("~"), model);
  EXPECT_EQ(find_model("~/config.json"), model);
}

TEST(FindModel, FindsTheOneGgufFile) {
  TemporaryFolder folder;
  const std::string path = folder.path().string();
  folder.write("mmproj-f16.gguf", "GGUF");
  EXPECT_EQ(find_model(path), path);
  for (const char* part : {"x-00001-of-00002.gguf", "x-00002-of-00002.gguf"})
    folder.write(part, "GGUF");
  EXPECT_EQ(find_model(path), path + "/x-00001-of-00002.gguf");
  folder.write("y.gguf", "GGUF");
  EXPECT_EQ(find_model(path), path);
  EXPECT_EQ(gguf_files(folder.path()).size(), 2u);
}

TEST(FindModel, LooksIntoTheHubsCache) {
  TemporaryFolder folder;
  const fs::path cached = folder.path() / "hub" / "models--Some--Model";
  fs::create_directories(cached / "refs");
  for (const char* commit : {"1111", "2222"}) {
    fs::create_directories(cached / "snapshots" / commit);
    folder.write("hub/models--Some--Model/snapshots/" + std::string(commit) + "/config.json", "{}");
  }
  const std::string newest = (cached / "snapshots" / "2222").string();
  const Variable home("HF_HOME", folder.path().string());
  const Variable none("HF_HUB_CACHE", "");
  EXPECT_EQ(find_model("Some/Model"), "Some/Model");  // two snapshots and no refs/main
  folder.write("hub/models--Some--Model/refs/main", "2222");
  EXPECT_EQ(find_model("Some/Model"), newest);
  EXPECT_EQ(find_model(cached.string()), newest);
  EXPECT_EQ(find_model("Some/Other"), "Some/Other");
  const Variable elsewhere("HF_HUB_CACHE", (folder.path() / "none").string());
  EXPECT_EQ(find_model("Some/Model"), "Some/Model");

  EXPECT_EQ(download_hint(newest), "");
  fs::create_directories(cached / "blobs");
  folder.write("hub/models--Some--Model/blobs/abc.incomplete", "");
  EXPECT_NE(download_hint(newest), "");
}

}  // namespace
}  // namespace kvzap::model
