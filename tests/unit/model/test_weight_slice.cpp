// Experts that share a tensor, as matrices of their own.
#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "model/weight_slice.hpp"
#include "model/weights.hpp"
#include "unit/temporary_folder.hpp"

namespace {

using kvzap::model::open_slice;
using kvzap::model::StoredTensor;
using kvzap::model::TensorSlice;
using kvzap::model::WeightStore;
using kvzap::test::expect_error;
using Shape = std::vector<std::int64_t>;

/// Tensors whose values are their own indices.
class CountingStore final : public WeightStore {
 public:
  std::map<std::string, Shape, std::less<>> shapes;

  std::unique_ptr<StoredTensor> at(std::string_view name, const Shape& shape) const override {
    const auto found = shapes.find(name);
    if (found == shapes.end() || found->second != shape) throw kvzap::Error("another shape");
    return std::make_unique<Tensor>(shape.back());
  }
  bool has(std::string_view name) const override { return shapes.count(name) != 0; }

 private:
  struct Tensor final : StoredTensor {
    explicit Tensor(std::int64_t count) : columns(count) {}
    void read(std::int64_t row_begin, std::int64_t row_end, std::int64_t begin, std::int64_t end,
              float* target) const override {
      for (std::int64_t r = row_begin; r < row_end; ++r) {
        for (std::int64_t c = begin; c < end; ++c) *target++ = static_cast<float>(r * columns + c);
      }
    }
    std::string description() const override { return "counting"; }
    void release() const override {}
    std::int64_t columns;
  };
};

constexpr std::int64_t experts = 3, outputs = 6, inputs = 4;

/// The row of the file that holds row `row`, gate before up.
std::int64_t stored_row(std::int64_t row, bool alternates) {
  return !alternates ? row : row < outputs / 2 ? 2 * row : 2 * (row - outputs / 2) + 1;
}

TEST(WeightSlice, ReadsMatricesAndVectors) {
  CountingStore store;
  store.shapes = {{"transposed", {experts, inputs, outputs}},
                  {"bias", {experts, outputs}},
                  {"quantised", {experts, outputs, inputs}},
                  {"quantised_blocks", {}}};
  for (const bool alternates : {false, true}) {
    for (std::int64_t e = 0; e < experts; ++e) {
      const TensorSlice slice{e, experts, alternates};
      const auto transposed = open_slice(store, "transposed", slice, outputs, inputs);
      const auto quantised = open_slice(store, "quantised", slice, outputs, inputs);
      const auto bias = open_slice(store, "bias", slice, outputs, 0);
      // Any rows, also of both halves, and any columns.
      for (std::int64_t begin = 0; begin < outputs; ++begin) {
        for (std::int64_t end = begin; end <= outputs; ++end) {
          for (const auto& [first, last] : {std::pair{0, 4}, {1, 3}, {3, 4}}) {
            const std::size_t count = (end - begin) * (last - first);
            std::vector<float> a(count), b(count);
            transposed->read(begin, end, first, last, a.data());
            quantised->read(begin, end, first, last, b.data());
            std::size_t i = 0;
            for (std::int64_t r = begin; r < end; ++r) {
              const std::int64_t row = stored_row(r, alternates);
              for (std::int64_t c = first; c < last; ++c, ++i) {
                ASSERT_EQ(a[i], static_cast<float>((e * inputs + c) * outputs + row));
                ASSERT_EQ(b[i], static_cast<float>((e * outputs + row) * inputs + c));
              }
            }
          }
          std::vector<float> values(end - begin);
          bias->read(begin, end, 0, 1, values.data());
          for (std::int64_t r = begin; r < end; ++r) {
            ASSERT_EQ(values[r - begin],
                      static_cast<float>(e * outputs + stored_row(r, alternates)));
          }
        }
      }
    }
  }
  // The matrix or vector is the whole tensor.
  store.shapes["whole"] = {outputs, inputs};
  store.shapes["whole_vector"] = {outputs};
  const TensorSlice whole{0, 0, true, true};
  for (std::int64_t begin = 0; begin < outputs; ++begin) {
    for (std::int64_t end = begin; end <= outputs; ++end) {
      std::vector<float> rows((end - begin) * inputs), values(end - begin);
      open_slice(store, "whole", whole, outputs, inputs)->read(begin, end, 0, inputs, rows.data());
      open_slice(store, "whole_vector", whole, outputs, 0)->read(begin, end, 0, 1, values.data());
      for (std::int64_t r = begin; r < end; ++r) {
        ASSERT_EQ(rows[(r - begin) * inputs], static_cast<float>(stored_row(r, true) * inputs));
        ASSERT_EQ(values[r - begin], static_cast<float>(stored_row(r, true)));
      }
    }
  }
  // The first two extents are one.
  store.shapes["flat"] = {experts * outputs, inputs};
  store.shapes["flat_transposed"] = {experts * inputs, outputs};
  std::vector<float> a(outputs * inputs), b(outputs * inputs);
  open_slice(store, "flat", {2, experts, false, true, true}, outputs, inputs)
      ->read(0, outputs, 0, inputs, a.data());
  open_slice(store, "flat_transposed", {2, experts, false, false, true}, outputs, inputs)
      ->read(0, outputs, 0, inputs, b.data());
  for (std::int64_t r = 0; r < outputs; ++r) {
    for (std::int64_t c = 0; c < inputs; ++c) {
      EXPECT_EQ(a[r * inputs + c], static_cast<float>((2 * outputs + r) * inputs + c));
      EXPECT_EQ(b[r * inputs + c], static_cast<float>((2 * inputs + c) * outputs + r));
    }
  }
  expect_error(
      [&] {
        open_slice(store, "transposed", {0, experts}, inputs, outputs);
      },
      {"another shape"});
  expect_error([&] { open_slice(store, "bias", {0, experts + 1}, outputs, 0); }, {"another shape"});
}

}  // namespace
