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
  // Two snapshots and no refs/main.
  EXPECT_EQ(find_model("Some/Model"), cached.string());
  EXPECT_NE(download_hint(cached).find("hf download Some/Model"), std::string::npos);
  folder.write("hub/models--Some--Model/refs/main", "2222");
  EXPECT_EQ(find_model("Some/Model"), newest);
  EXPECT_EQ(find_model(cached.string()), newest);
  for (const char* name : {"Some/Model/", "hf.co/Some/Model", "https://huggingface.co/Some/Model",
                           "https://huggingface.co/Some/Model/tree/main", "Some/Model:Q8_0"}) {
    EXPECT_EQ(find_model(name), newest) << name;
  }
  EXPECT_EQ(find_model("Some/Other"), "Some/Other");
  const Variable elsewhere("HF_HUB_CACHE", (folder.path() / "none").string());
  EXPECT_EQ(find_model("Some/Model"), "Some/Model");

  EXPECT_EQ(download_hint(newest), "");
  fs::create_directories(cached / "blobs");
  folder.write("hub/models--Some--Model/blobs/abc.incomplete", "");
  EXPECT_NE(download_hint(newest), "");
}

TEST(FindModel, KnowsNamesOfTheHub) {
  const std::pair<const char*, const char*> calls[] = {
      {"a/b", "hf download a/b --local-dir b"},
      {"a/b/", "hf download a/b --local-dir b"},
      {"hf.co/a/b:Q8_0", "hf download a/b --include '*Q8_0*.gguf' --local-dir b"},
      {"https://huggingface.co/a/b/resolve/main/c-Q4.gguf?download=true",
       "hf download a/b c-Q4.gguf --local-dir b"},
      {"https://huggingface.co/a/b/tree/main", "hf download a/b --local-dir b"}};
  for (const auto& [name, call] : calls) {
    EXPECT_EQ(download_call(name), call);
    EXPECT_NE(name_hint(name).find(call), std::string::npos) << name_hint(name);
  }
  EXPECT_NE(name_hint("qwen3:8b").find("ollama show qwen3:8b --modelfile"), std::string::npos);
  EXPECT_NE(name_hint("gpt2").find("hf download OWNER/NAME"), std::string::npos);
  for (const char* path : {"", "/a/b", "./a/b", "~/a", "a/b/c", "a/x.txt", "a b/c", "x.h5", "a/"}) {
    EXPECT_EQ(name_hint(path), "") << path;
  }
}

}  // namespace
}  // namespace kvzap::model
