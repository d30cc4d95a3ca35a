#include "model/random_store.hpp"

#include <algorithm>
#include <string>

namespace kvzap::model {
namespace {

// splitmix64's finalizer: a cheap hash whose output bits are all usable.
std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

std::uint64_t hash_of(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325ull;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  return hash;
}

// The sum of four uniform 16-bit numbers is close enough to a normal one for weights.
float random_weight(std::uint64_t key, std::uint64_t index) {
  const std::uint64_t bits = mix(key ^ index);
  const int sum = static_cast<int>(bits & 0xffff) + static_cast<int>((bits >> 16) & 0xffff) +
                  static_cast<int>((bits >> 32) & 0xffff) + static_cast<int>(bits >> 48);
  constexpr float standard_deviation = 37837.0f;  // sqrt(4 / 12) * 65536
  return static_cast<float>(sum - 2 * 65535) * (0.02f / standard_deviation);
}

class RandomTensor final : public StoredTensor {
 public:
  RandomTensor(std::string_view name, std::uint64_t seed, const std::vector<std::int64_t>& shape)
      : m_name(name),
        m_key(mix(seed) ^ hash_of(name)),
        m_columns(shape.empty() ? 1 : shape.back()),
        m_is_vector(shape.size() <= 1) {}

  void read(std::int64_t row_begin, std::int64_t row_end, std::int64_t begin, std::int64_t end,
            float* target) const override {
    if (m_is_vector) {
      const bool is_factor =
          m_name.find("norm") != std::string::npos ||
          m_name.find("scal") != std::string::npos;  // layer_scalar, router.scale
      std::fill_n(target, end - begin, is_factor ? 1.0f : 0.0f);
      return;
    }
    for (std::int64_t row = row_begin; row < row_end; ++row) {
      for (std::int64_t i = begin; i < end; ++i)
        *target++ = random_weight(m_key, row * m_columns + i);
    }
  }
  std::string description() const override { return "random tensor " + m_name; }
  void release() const override {}

 private:
  std::string m_name;
  std::uint64_t m_key;
  std::int64_t m_columns;
  bool m_is_vector;
};

}  // namespace

std::unique_ptr<StoredTensor> RandomStore::at(std::string_view name,
                                              const std::vector<std::int64_t>& shape) const {
  return std::make_unique<RandomTensor>(name, m_seed, shape);
}

}  // namespace kvzap::model
