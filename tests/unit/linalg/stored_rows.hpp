// Rows of quantised weights as checkpoints store them, with random codes, and their values.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gguf/block_formats.hpp"
#include "linalg/gemm.hpp"
#include "linalg/quantised/matrix.hpp"

namespace kvzap::stored {

namespace quantised = linalg::quantised;
using Ranges = std::vector<std::pair<std::int64_t, std::int64_t>>;

inline constexpr const char* names[] = {"Q4_0", "Q4_1", "Q5_0",   "Q5_1",  "Q8_0", "Q4_K",
                                        "Q5_K", "Q6_K", "IQ4_NL", "MXFP4", "INT4", "F8_E4M3"};

inline void decode_int4(const std::byte* blocks, std::int64_t n_blocks, float* target) {
  for (std::int64_t b = 0; b < n_blocks; ++b, blocks += 19, target += 32) {
    kvzap::half scale{};
    std::memcpy(&scale, blocks, sizeof(scale));
    for (int i = 0; i < 32; ++i) {
      const int code = std::to_integer<int>(blocks[3 + i % 16]) >> (i / 16 * 4) & 15;
      target[i] =
          static_cast<float>(scale) * static_cast<float>(code - std::to_integer<int>(blocks[2]));
    }
  }
}

inline void decode_f8(const std::byte* blocks, std::int64_t n_blocks, float* target) {
  for (std::int64_t b = 0; b < n_blocks; ++b, blocks += 132, target += 128) {
    float scale = 0;
    std::memcpy(&scale, blocks, sizeof(scale));
    for (int i = 0; i < 128; ++i) {
      const int code = std::to_integer<int>(blocks[4 + i]);
      const int exponent = code >> 3 & 15;
      const auto mantissa = static_cast<float>((code & 7) + (exponent > 0 ? 8 : 0));
      const float value = std::ldexp(mantissa, std::max(exponent, 1) - 10);
      target[i] = scale * (code < 128 ? value : -value);
    }
  }
}

/// The formats of GGUF files, and those of other checkpoints.
inline gguf::BlockFormat stored_format(const std::string& name) {
  if (const auto* const found = gguf::find_block_format(name)) return *found;
  const bool is_int4 = name == "INT4";
  gguf::BlockFormat format{};
  format.name = is_int4 ? "INT4" : "F8_E4M3";
  format.values = is_int4 ? 32 : 128;
  format.bytes = is_int4 ? 19 : 132;
  format.decode = is_int4 ? decode_int4 : decode_f8;
  return format;
}

/// Rows of one format with random codes, and scales near 0.01.
struct StoredRows {
  gguf::BlockFormat format;
  std::int64_t rows, columns;
  std::vector<std::byte> bytes;

  StoredRows(const std::string& name, std::int64_t rows, std::int64_t columns, std::mt19937& random)
      : format(stored_format(name)), rows(rows), columns(columns) {
    bytes.resize(rows * row_bytes());
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
    for (std::size_t at = 0; at < bytes.size(); at += format.bytes) {
      if (name == "MXFP4") {
        bytes[at] = static_cast<std::byte>(118 + random() % 4);
        continue;
      }
      if (name == "F8_E4M3") {
        const float scale = 1e-4f + 1e-7f * static_cast<float>(random() % 1000);
        std::memcpy(&bytes[at], &scale, sizeof(scale));
        for (std::size_t i = at + 4; i < at + 132; ++i) {
          if ((bytes[i] & std::byte{127}) == std::byte{127}) bytes[i] = std::byte{0};  // NaN
        }
        continue;
      }
      const auto put = [&](std::size_t offset) {
        const kvzap::half scale(0.002f + 1e-5f * static_cast<float>(random() % 1000));
        std::memcpy(&bytes[at + offset], &scale, sizeof(scale));
      };
      put(name == "Q6_K" ? 208 : 0);
      if (name == "INT4") bytes[at + 2] &= std::byte{15};
      if (name == "Q4_1" || name == "Q5_1" || name == "Q4_K" || name == "Q5_K") put(2);
    }
  }
  std::int64_t row_bytes() const { return columns / format.values * format.bytes; }
  const std::byte* row(std::int64_t i) const { return bytes.data() + i * row_bytes(); }
  std::vector<float> values(std::int64_t i) const {
    std::vector<float> result(columns);
    format.decode(row(i), columns / format.values, result.data());
    return result;
  }
};

/// A matrix of several parts, and its values.
struct Weights {
  std::shared_ptr<quantised::Matrix> matrix;
  std::vector<std::vector<float>> values;
  bool is_shuffled = false;

  Weights(const std::vector<StoredRows>& parts, const Ranges& columns) {
    const auto formats = take(parts, [&](const std::vector<float>& all) {
      std::vector<float> own;
      for (const auto& [begin, end] : columns) {
        own.insert(own.end(), all.begin() + begin, all.begin() + end);
      }
      return own;
    });
    pack(parts, std::make_shared<quantised::Matrix>(formats, columns));
  }

  /// Column i of x belongs to value places[i] of stored rows.
  static Weights shuffled(const std::vector<StoredRows>& parts,
                          const std::vector<std::int32_t>& places) {
    Weights weights;
    weights.is_shuffled = true;
    const auto formats = weights.take(parts, [&](const std::vector<float>& all) {
      std::vector<float> own;
      for (const std::int32_t place : places) own.push_back(all[place]);
      return own;
    });
    weights.pack(parts,
                 std::make_shared<quantised::Matrix>(formats, places, parts.front().columns));
    return weights;
  }

 private:
  Weights() = default;

  template <class Own>
  std::vector<quantised::Matrix::Part> take(const std::vector<StoredRows>& parts, const Own& own) {
    std::vector<quantised::Matrix::Part> formats;
    for (const StoredRows& part : parts) {
      formats.push_back({quantised::find_format(part.format.name), part.rows});
      for (std::int64_t i = 0; i < part.rows; ++i) values.push_back(own(part.values(i)));
    }
    return formats;
  }

  void pack(const std::vector<StoredRows>& parts, std::shared_ptr<quantised::Matrix> planned) {
    matrix = std::move(planned);
    std::vector<const std::byte*> rows;
    for (const StoredRows& part : parts) {
      for (std::int64_t i = 0; i < part.rows; ++i) rows.push_back(part.row(i));
    }
    const quantised::Matrix::Data data("data", matrix->bytes());
    const auto host = Kokkos::create_mirror_view(data);
    matrix->place(data);
    for (std::int64_t i = 0; i < matrix->n_panels(); ++i) {
      const auto [section, panel] = matrix->panel(i);
      matrix->pack(i, rows.data() + section->first + panel * quantised::panel_outputs, host.data());
    }
    Kokkos::deep_copy(data, host);
  }
};

/// `count` of the places below `stored`, in any order.
inline std::vector<std::int32_t> some_places(std::int64_t stored, std::int64_t count,
                                             std::mt19937& random) {
  std::vector<std::int32_t> places(stored);
  std::iota(places.begin(), places.end(), 0);
  std::shuffle(places.begin(), places.end(), random);
  places.resize(count);
  return places;
}

inline float uniform(std::mt19937& random) {
  return static_cast<float>(random() >> 8) * 0x1p-23f - 1.0f;
}

/// Rows whose groups have very different sizes.
inline linalg::Matrix random_rows(std::int64_t rows, std::int64_t columns, std::mt19937& random) {
  const linalg::Matrix x("x", rows, columns);
  const auto host = Kokkos::create_mirror_view(x);
  for (std::int64_t m = 0; m < rows; ++m) {
    for (std::int64_t k = 0; k < columns; ++k) {
      host(m, k) = uniform(random) * std::ldexp(1.0f, static_cast<int>(k / 32 % 5) - 2);
    }
  }
  Kokkos::deep_copy(x, host);
  return x;
}

}  // namespace kvzap::stored
