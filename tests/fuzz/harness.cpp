#include "harness.hpp"

#include <sanitizer/allocator_interface.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <kvzap/core/types.hpp>

namespace kvzap::fuzz {
namespace {

// What an input may take at once: README.md of this folder.
constexpr std::size_t bytes_per_byte = 4;
constexpr std::size_t bytes_besides = std::size_t{64} << 20;
constexpr std::size_t longest_message = 4096;

// Bytes that are allocated now, and how many may be. Targets have one thread.
std::size_t allocated = 0;
std::size_t most = 0;
std::size_t limit = SIZE_MAX;
// KVZAP_FUZZ_SAY: what the reader says of each input, and the bytes that it took.
const bool says = std::getenv("KVZAP_FUZZ_SAY") != nullptr;

void on_allocation(const volatile void*, std::size_t bytes) {
  allocated += bytes;
  most = std::max(most, allocated);
  if (allocated > limit) {
    limit = SIZE_MAX;  // what follows allocates too
    std::fprintf(stderr, "memory: %zu bytes at once, the last %zu of them here\n", most, bytes);
    std::abort();
  }
}

void on_release(const volatile void* pointer) {
  if (pointer == nullptr) return;
  const std::size_t bytes = __sanitizer_get_allocated_size(pointer);
  allocated -= std::min(bytes, allocated);  // what was there before is not counted
}

void check(const std::string& message) {
  require(!message.empty(), "an error without a message");
  if (message.size() > longest_message) {
    finding("a message of more than 4096 bytes: " + message.substr(0, 200));
  }
  for (const char c : message) {
    const auto byte = static_cast<unsigned char>(c);
    if ((byte < 0x20 && c != '\n' && c != '\t') || byte == 0x7F) {
      finding("a control character in a message: " + message);
    }
  }
  for (const std::string_view name : named_in_messages) {
    if (message.find(name) == std::string::npos) {
      finding("a message that does not name " + std::string(name) + ": " + message);
    }
  }
}

// KVZAP_FUZZ_REPEAT=BYTES: a part of the input is repeated until it is so long. What memory a
// reader takes for each byte shows in large inputs alone, and those are slow: this is for corpora.
std::string repeated(std::string_view input, std::size_t bytes, std::size_t begin,
                     std::size_t end) {
  std::string text(input.substr(0, end));
  const std::string_view part = input.substr(begin, end - begin);
  while (text.size() + input.size() < bytes) text += part;
  text += input.substr(end);
  return text;
}

void run_checked(std::string_view input) {
  allocated = 0;
  most = 0;
  limit = input.size() * bytes_per_byte + bytes_besides;
  try {
    run_one(input);
    limit = SIZE_MAX;
    if (says) std::fprintf(stderr, "taken\n");
  } catch (const Error& error) {
    limit = SIZE_MAX;
    check(error.what());
    if (says) std::fprintf(stderr, "%s\n", error.what());
  }
  if (says) std::fprintf(stderr, "%zu bytes of an input of %zu\n", most, input.size());
}

}  // namespace

void finding(const std::string& what) {
  limit = SIZE_MAX;
  std::fprintf(stderr, "finding: %s\n", what.c_str());
  std::abort();
}

InputFile::InputFile() {
  // (No memfd: HDF5 wants to know the real name.)
  std::string pattern = (std::filesystem::temp_directory_path() / "kvzap-fuzz-XXXXXX").string();
  m_descriptor = ::mkstemp(pattern.data());
  if (m_descriptor < 0) finding("no file for inputs");
  m_path = pattern;
}

InputFile::~InputFile() {
  ::close(m_descriptor);
  ::unlink(m_path.c_str());
}

void InputFile::assign(std::string_view content) {
  if (::ftruncate(m_descriptor, static_cast<off_t>(content.size())) != 0) finding("no memory");
  while (!content.empty()) {
    const ssize_t written = ::pwrite(m_descriptor, content.data(), content.size(), 0);
    if (written != static_cast<ssize_t>(content.size())) finding("no memory");
    content.remove_prefix(static_cast<std::size_t>(written));
  }
}

InputFolder::InputFolder() {
  std::string pattern = (std::filesystem::temp_directory_path() / "kvzap-fuzz-XXXXXX").string();
  if (::mkdtemp(pattern.data()) == nullptr) finding("no folder for links");
  m_path = pattern;
}

InputFolder::~InputFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(m_path, ignored);
}

void InputFolder::link(const char* name, const InputFile& file) const {
  std::filesystem::create_symlink(file.path(), m_path / name);
}

}  // namespace kvzap::fuzz

// For speed: where memory came from is not written down (malloc_context_size=30 in ASAN_OPTIONS
// does it when a finding is looked at), and it is not given back to the system.
extern "C" const char* __asan_default_options() {
  return "malloc_context_size=1:quarantine_size_mb=16:max_malloc_fill_size=256:"
         "allocator_release_to_os_interval_ms=-1:handle_abort=1:detect_leaks=0";
}

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  __sanitizer_install_malloc_and_free_hooks(kvzap::fuzz::on_allocation, kvzap::fuzz::on_release);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  static const char* const repeat = std::getenv("KVZAP_FUZZ_REPEAT");
  if (repeat == nullptr || input.empty()) {
    kvzap::fuzz::run_checked(input);
    return 0;
  }
  const std::size_t bytes = std::strtoull(repeat, nullptr, 10);
  // Parts of many sizes at many places, the same each time.
  std::uint64_t state = size;
  const auto number = [&](std::size_t below) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    return static_cast<std::size_t>((state >> 33) % below);
  };
  for (int i = 0; i < 8; ++i) {
    const std::size_t begin = number(size);
    const std::size_t end = std::min(size, begin + 1 + number(std::size_t{2} << (2 * (i % 5))));
    kvzap::fuzz::run_checked(kvzap::fuzz::repeated(input, bytes, begin, end));
  }
  return 0;
}
