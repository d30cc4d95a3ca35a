// A fresh folder for one test, and the check that a call fails with a message that helps.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <kvzap/core/types.hpp>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>

namespace kvzap::test {

/// Created empty, removed with all it holds.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "kvzap-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    m_path = pattern;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(m_path, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::filesystem::path& path() const { return m_path; }

  /// Writes `content` to the file `name`, replacing what was there.
  void write(const std::string& name, std::string_view content) const {
    std::ofstream stream(m_path / name, std::ios::binary | std::ios::trunc);
    stream.write(content.data(), static_cast<std::streamsize>(content.size()));
    if (!stream.flush()) throw std::runtime_error("cannot write " + name);
  }

 private:
  std::filesystem::path m_path;
};

/// Expects `call` to throw Error with a message that contains every one of `parts`.
template <class Call>
void expect_error(Call&& call, std::initializer_list<std::string_view> parts) {
  try {
    call();
  } catch (const Error& error) {
    for (const std::string_view part : parts) {
      EXPECT_NE(std::string_view(error.what()).find(part), std::string_view::npos)
          << "'" << part << "' is not in: " << error.what();
    }
    return;
  }
  ADD_FAILURE() << "no Error was thrown";
}

}  // namespace kvzap::test
