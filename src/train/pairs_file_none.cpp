// Files of pairs in a build without HDF5: all functions throw.
#include <fmt/format.h>

#include <kvzap/lab/pairs.hpp>

namespace kvzap {
namespace {

std::string refusal(const std::filesystem::path& file) {
  return fmt::format("pairs file {}: this kvzap was built without HDF5 (KVZAP_ENABLE_HDF5=OFF)",
                     file.string());
}

}  // namespace

std::unique_ptr<PairsFile> PairsFile::open(const std::filesystem::path& file) {
  throw Error(refusal(file));
}

std::unique_ptr<PairsWriter> PairsWriter::open(const std::filesystem::path& file, const PairsPlan&,
                                               const std::vector<std::vector<int>>&,
                                               const Communicator&) {
  throw AgreedError(refusal(file));
}

}  // namespace kvzap
