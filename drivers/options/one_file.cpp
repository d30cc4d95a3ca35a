#include "options/one_file.hpp"

#include <filesystem>
#include <system_error>

namespace kvzap::driver {
namespace {

namespace fs = std::filesystem;

/// Returns the path at which a file of this name is or would be written. Follows links, even to a
/// file that does not exist yet.
fs::path place_of(const std::string& name) {
  std::error_code failed;
  fs::path path = fs::absolute(name, failed);
  constexpr int most_links = 40;  // the limit of the kernel
  for (int i = 0; i < most_links && fs::is_symlink(path, failed); ++i) {
    path = path.parent_path() / fs::read_symlink(path, failed);
  }
  fs::path place = fs::weakly_canonical(path, failed);
  return failed ? path.lexically_normal() : place;
}

}  // namespace

bool name_one_file(const std::string& a, const std::string& b) {
  if (a == b) return true;
  if (a == "-" || b == "-") return false;
  std::error_code failed;
  return place_of(a) == place_of(b) || fs::equivalent(a, b, failed);  // the latter for hard links
}

}  // namespace kvzap::driver
