#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <kvzap/model/safetensors.hpp>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "files/mapped_file.hpp"
#include "unit/temporary_folder.hpp"

namespace {

using kvzap::DType;
using kvzap::SafetensorsFolder;
using kvzap::TensorInfo;
using kvzap::test::expect_error;
using kvzap::test::TemporaryFolder;

static_assert(!std::is_copy_constructible_v<SafetensorsFolder>);
static_assert(std::is_nothrow_move_constructible_v<kvzap::files::MappedFile>);

/// A file image: header length, header, data.
std::string image(const std::string& header, const std::string& data) {
  std::string bytes;
  for (int shift = 0; shift < 64; shift += 8) {
    bytes.push_back(static_cast<char>((header.size() >> shift) & 0xff));
  }
  return bytes + header + data;
}

std::string image_with_length(std::uint64_t length, const std::string& rest) {
  std::string bytes;
  for (int shift = 0; shift < 64; shift += 8) {
    bytes.push_back(static_cast<char>((length >> shift) & 0xff));
  }
  return bytes + rest;
}

std::string bytes_of(const std::vector<float>& values) {
  std::string bytes(values.size() * sizeof(float), '\0');
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

/// "a": F32 [2, 3] = 0..5, "b": BF16 [4], "ids": I64 [1], "empty": F16 [0, 7].
std::string valid_image() {
  const std::string header = R"({"__metadata__":{"format":"pt"},)"
                             R"("a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
                             R"("b":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]},)"
                             R"("empty":{"dtype":"F16","shape":[0,7],"data_offsets":[32,32]},)"
                             R"("ids":{"dtype":"I64","shape":[1],"data_offsets":[32,40]}}  )";
  return image(header, bytes_of({0, 1, 2, 3, 4, 5}) + std::string(16, '\1'));
}

/// A file of one tensor "t", 4 data bytes, whose header entry is `entry`.
void expect_entry_error(const std::string& entry, std::initializer_list<std::string_view> parts) {
  TemporaryFolder folder;
  folder.write("model.safetensors", image("{\"t\":" + entry + "}", std::string(4, '\0')));
  expect_error([&] { SafetensorsFolder::open(folder.path()); }, {"model.safetensors", "'t'"});
  expect_error([&] { SafetensorsFolder::open(folder.path()); }, parts);
}

void expect_image_error(const std::string& content, std::initializer_list<std::string_view> parts) {
  TemporaryFolder folder;
  folder.write("model.safetensors", content);
  expect_error([&] { SafetensorsFolder::open(folder.path()); }, {"model.safetensors"});
  expect_error([&] { SafetensorsFolder::open(folder.path()); }, parts);
}

float read_float(const TensorInfo& info, std::size_t index) {
  float value;
  std::memcpy(&value, info.data + index * sizeof(float), sizeof(value));
  return value;
}

TEST(Safetensors, ReadsValuesShapesAndTypes) {
  TemporaryFolder folder;
  folder.write("model.safetensors", valid_image());
  const auto tensors = SafetensorsFolder::open(folder.path());
  EXPECT_EQ(tensors.names(), (std::vector<std::string>{"a", "b", "empty", "ids"}));
  const TensorInfo& a = tensors.at("a", {2, 3});
  EXPECT_EQ(a.name, "a");
  EXPECT_EQ(a.dtype, DType::f32);
  EXPECT_TRUE(a.is_weight);
  EXPECT_EQ(a.bytes, 24u);
  EXPECT_EQ(a.file, (folder.path() / "model.safetensors").string());
  for (std::size_t i = 0; i < 6; ++i) EXPECT_EQ(read_float(a, i), static_cast<float>(i));
  EXPECT_EQ(tensors.at("b", {4}).dtype, DType::bf16);
  EXPECT_EQ(tensors.at("empty", {0, 7}).bytes, 0u);
  EXPECT_EQ(tensors.find("nobody"), nullptr);
}

TEST(Safetensors, OpensASingleFileByItsPath) {
  TemporaryFolder folder;
  folder.write("other.safetensors", valid_image());
  folder.write("damaged.safetensors", "x");
  const auto tensors = SafetensorsFolder::open(folder.path() / "other.safetensors");
  EXPECT_EQ(tensors.names().size(), 4u);
}

TEST(Safetensors, DataOutlivesAMove) {
  TemporaryFolder folder;
  folder.write("model.safetensors", valid_image());
  auto first = SafetensorsFolder::open(folder.path());
  const std::byte* const data = first.at("a", {2, 3}).data;
  auto second = std::move(first);
  first = SafetensorsFolder::open(folder.path());
  EXPECT_EQ(second.at("a", {2, 3}).data, data);
  EXPECT_EQ(read_float(second.at("a", {2, 3}), 5), 5.0f);
}

TEST(Safetensors, MissingTensorIsNamed) {
  TemporaryFolder folder;
  folder.write("model.safetensors", valid_image());
  const auto tensors = SafetensorsFolder::open(folder.path());
  expect_error(
      [&] {
        tensors.at("lm_head.weight", {4, 2});
      },
      {folder.path().string(), "lm_head.weight", "[4, 2]", "missing"});
}

TEST(Safetensors, WrongShapeIsNamed) {
  TemporaryFolder folder;
  folder.write("model.safetensors", valid_image());
  const auto tensors = SafetensorsFolder::open(folder.path());
  expect_error(
      [&] {
        tensors.at("a", {3, 2});
      },
      {"model.safetensors", "'a'", "expected shape [3, 2]", "found [2, 3]"});
}

TEST(Safetensors, OtherTypesAreFoundButAreNoWeights) {
  TemporaryFolder folder;
  folder.write("model.safetensors", valid_image());
  const auto tensors = SafetensorsFolder::open(folder.path());
  ASSERT_NE(tensors.find("ids"), nullptr);
  EXPECT_FALSE(tensors.find("ids")->is_weight);
  EXPECT_EQ(tensors.find("ids")->stored_dtype, "I64");
  expect_error([&] { tensors.at("ids", {1}); },
               {"model.safetensors", "'ids'", "dtype I64, expected F32, F16 or BF16"});
}

TEST(Safetensors, TypesNobodyKnowsAreToleratedUntilAskedFor) {
  TemporaryFolder folder;
  folder.write("model.safetensors",
               image(R"({"t":{"dtype":"F3_X","shape":[3],"data_offsets":[0,2]}})", "xy"));
  const auto tensors = SafetensorsFolder::open(folder.path());
  expect_error([&] { tensors.at("t", {3}); }, {"dtype F3_X, expected F32, F16 or BF16"});
}

TEST(Safetensors, EmptyFile) { expect_image_error("", {"empty"}); }

TEST(Safetensors, ShorterThanTheLengthField) {
  expect_image_error("1234567", {"at least 8 bytes", "found 7"});
}

TEST(Safetensors, HeaderLongerThanTheFile) {
  expect_image_error(image_with_length(100, "{}"),
                     {"truncated", "expected at least 108", "found 10"});
}

TEST(Safetensors, HeaderLengthAboveTheLimit) {
  expect_image_error(image_with_length(~std::uint64_t{0}, "{}"),
                     {"at most 100000000", "found a length of 18446744073709551615"});
}

TEST(Safetensors, EmptyHeader) { expect_image_error(image("", ""), {"starts with '{'"}); }

TEST(Safetensors, HeaderThatIsNoObject) {
  expect_image_error(image("[1, 2]", ""), {"starts with '{'"});
}

TEST(Safetensors, HeaderThatIsNoJson) {
  expect_image_error(image("{\"a\": ", ""), {"header", "not valid JSON"});
}

TEST(Safetensors, HeaderWithInvalidUtf8) {
  expect_image_error(image("{\"\xff\": 1}", ""), {"header", "not valid JSON"});
}

TEST(Safetensors, DeeplyNestedHeader) {
  expect_image_error(image("{\"a\":" + std::string(1000000, '[') + "}", ""), {"nested too deeply"});
}

TEST(Safetensors, RepeatedName) {
  const std::string entry = R"("t":{"dtype":"F32","shape":[0],"data_offsets":[0,0]})";
  expect_image_error(image("{" + entry + "," + entry + "}", ""), {"'t'", "more than once"});
}

TEST(Safetensors, EntryThatIsNoObject) {
  expect_entry_error("7", {"expected an object", "number"});
}

TEST(Safetensors, MissingDtype) {
  expect_entry_error(R"({"shape":[1],"data_offsets":[0,4]})", {"dtype is missing"});
}

TEST(Safetensors, DtypeOfWrongType) {
  expect_entry_error(R"({"dtype":3,"shape":[1],"data_offsets":[0,4]})",
                     {"dtype", "expected a string", "found number"});
}

TEST(Safetensors, MissingShape) {
  expect_entry_error(R"({"dtype":"F32","data_offsets":[0,4]})", {"shape is missing"});
}

TEST(Safetensors, ShapeOfWrongType) {
  expect_entry_error(R"({"dtype":"F32","shape":"1","data_offsets":[0,4]})",
                     {"shape", "expected an array", "found string"});
}

TEST(Safetensors, NegativeExtent) {
  expect_entry_error(R"({"dtype":"F32","shape":[-1],"data_offsets":[0,4]})",
                     {"shape", "non-negative"});
}

TEST(Safetensors, FractionalExtent) {
  expect_entry_error(R"({"dtype":"F32","shape":[1.0],"data_offsets":[0,4]})",
                     {"shape", "non-negative integer"});
}

TEST(Safetensors, ShapeProductOverflows) {
  expect_entry_error(R"({"dtype":"F32","shape":[4294967296,4294967297],"data_offsets":[0,4]})",
                     {"shape", "64 bits"});
}

TEST(Safetensors, ByteCountOverflows) {
  expect_entry_error(R"({"dtype":"F32","shape":[4611686018427387905],"data_offsets":[0,4]})",
                     {"shape", "64 bits"});
}

TEST(Safetensors, ExtentAboveSigned64Bits) {
  expect_entry_error(R"({"dtype":"F32","shape":[9223372036854775808],"data_offsets":[0,4]})",
                     {"shape", "64 bits"});
}

TEST(Safetensors, MissingOffsets) {
  expect_entry_error(R"({"dtype":"F32","shape":[1]})", {"data_offsets is missing"});
}

TEST(Safetensors, OffsetsOfWrongCount) {
  expect_entry_error(R"({"dtype":"F32","shape":[1],"data_offsets":[0,4,8]})",
                     {"data_offsets", "two"});
}

TEST(Safetensors, NegativeOffset) {
  expect_entry_error(R"({"dtype":"F32","shape":[1],"data_offsets":[-4,0]})",
                     {"data_offsets", "non-negative"});
}

TEST(Safetensors, OffsetsInReverse) {
  expect_entry_error(R"({"dtype":"F32","shape":[1],"data_offsets":[4,0]})",
                     {"data_offsets", "expected begin <= end", "found [4, 0]"});
}

TEST(Safetensors, BytesThatDoNotFitTheShape) {
  expect_entry_error(R"({"dtype":"F32","shape":[2],"data_offsets":[0,4]})",
                     {"expected 8 bytes for F32 of shape [2]", "found 4"});
}

TEST(Safetensors, TruncatedData) {
  const std::string content = valid_image();
  expect_image_error(content.substr(0, content.size() - 3),
                     {"truncated", "expected " + std::to_string(content.size()) + " bytes",
                      "found " + std::to_string(content.size() - 3)});
}

TEST(Safetensors, OffsetNearTheEndOf64Bits) {
  expect_image_error(
      image(R"({"t":{"dtype":"X","shape":[],"data_offsets":[0,18446744073709551615]}})", ""),
      {"64 bits"});
}

TEST(Safetensors, TrailingBytes) {
  const std::string content = valid_image() + "xyz";
  expect_image_error(
      content, {"3 bytes follow the last tensor", "expected " + std::to_string(content.size() - 3),
                "found " + std::to_string(content.size())});
}

TEST(Safetensors, OverlappingTensors) {
  expect_image_error(image(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                           R"("b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
                           std::string(8, '\0')),
                     {"'b'", "overlap", "expected a begin of 8", "found 4"});
}

TEST(Safetensors, GapBetweenTensors) {
  expect_image_error(image(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                           R"("b":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}})",
                           std::string(12, '\0')),
                     {"'b'", "gap of 4 bytes", "expected a begin of 4", "found 8"});
}

TEST(Safetensors, MissingFolder) {
  TemporaryFolder folder;
  expect_error([&] { SafetensorsFolder::open(folder.path() / "none"); },
               {"none", "no such folder"});
}

TEST(Safetensors, FolderWithoutWeights) {
  TemporaryFolder folder;
  expect_error([&] { SafetensorsFolder::open(folder.path()); },
               {folder.path().string(), "no *.safetensors"});
}

TEST(Safetensors, FolderWithPytorchWeightsOnly) {
  TemporaryFolder folder;
  folder.write("pytorch_model.bin", "x");
  expect_error([&] { SafetensorsFolder::open(folder.path()); },
               {"no *.safetensors", ".bin", "not supported"});
}

TEST(Safetensors, WeightFileThatIsAFolder) {
  TemporaryFolder folder;
  std::filesystem::create_directory(folder.path() / "model.safetensors");
  expect_error([&] { SafetensorsFolder::open(folder.path()); },
               {"model.safetensors", "not a regular file"});
}

std::string one_tensor(const std::string& name) {
  return image("{\"" + name + R"(":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
               bytes_of({1}));
}

TEST(Safetensors, SeveralFilesWithoutIndex) {
  TemporaryFolder folder;
  folder.write("x.safetensors", one_tensor("a"));
  folder.write("y.safetensors", one_tensor("b"));
  const auto tensors = SafetensorsFolder::open(folder.path());
  EXPECT_EQ(tensors.names(), (std::vector<std::string>{"a", "b"}));
}

TEST(Safetensors, ModelFileIsPreferredToOthers) {
  TemporaryFolder folder;
  folder.write("model.safetensors", one_tensor("a"));
  folder.write("y.safetensors", one_tensor("b"));
  EXPECT_EQ(SafetensorsFolder::open(folder.path()).names(), std::vector<std::string>{"a"});
}

TEST(Safetensors, SameTensorInTwoFiles) {
  TemporaryFolder folder;
  folder.write("x.safetensors", one_tensor("a"));
  folder.write("y.safetensors", one_tensor("a"));
  expect_error([&] { SafetensorsFolder::open(folder.path()); },
               {"x.safetensors", "y.safetensors", "'a'"});
}

constexpr const char* index_name = "model.safetensors.index.json";

TEST(Safetensors, IndexChoosesFilesAndTensors) {
  TemporaryFolder folder;
  folder.write("x.safetensors", one_tensor("a"));
  folder.write("y.safetensors", one_tensor("b"));
  folder.write("z.safetensors", one_tensor("a"));
  folder.write(index_name, R"({"metadata":{"total_size":8},)"
                           R"("weight_map":{"a":"x.safetensors","b":"y.safetensors"}})");
  const auto tensors = SafetensorsFolder::open(folder.path());
  EXPECT_EQ(tensors.at("a", {1}).file, (folder.path() / "x.safetensors").string());
  EXPECT_EQ(tensors.at("b", {1}).file, (folder.path() / "y.safetensors").string());
}

void expect_index_error(const std::string& index, std::initializer_list<std::string_view> parts) {
  TemporaryFolder folder;
  folder.write("x.safetensors", one_tensor("a"));
  folder.write(index_name, index);
  expect_error([&] { SafetensorsFolder::open(folder.path()); }, {index_name});
  expect_error([&] { SafetensorsFolder::open(folder.path()); }, parts);
}

TEST(Safetensors, IndexNamesMissingFile) {
  expect_index_error(R"({"weight_map":{"a":"gone.safetensors"}})",
                     {"index names the missing file 'gone.safetensors'"});
}

TEST(Safetensors, IndexNamesMissingTensor) {
  expect_index_error(R"({"weight_map":{"b":"x.safetensors"}})",
                     {"tensor 'b'", "'x.safetensors'", "does not hold it"});
}

TEST(Safetensors, IndexCannotLeaveItsFolder) {
  for (const char* name :
       {"../x.safetensors", "/etc/passwd", "a\\\\b", "..", ".", "", "x\\u0000y"}) {
    expect_index_error(std::string(R"({"weight_map":{"a":")") + name + "\"}}",
                       {"weight_map", "'a'", "plain file name"});
  }
}

TEST(Safetensors, IndexWithoutWeightMap) {
  expect_index_error("{}", {"weight_map", "expected an object", "found none"});
}

TEST(Safetensors, IndexWithValueOfWrongType) {
  expect_index_error(R"({"weight_map":{"a":1}})", {"'a'", "expected a file name", "found number"});
}

TEST(Safetensors, IndexThatIsNoJson) { expect_index_error("nonsense", {"not valid JSON"}); }

/// Touches every byte that the reader says belongs to a tensor.
unsigned checksum(const SafetensorsFolder& tensors) {
  unsigned total = 0;
  for (const std::string& name : tensors.names()) {
    const TensorInfo& info = *tensors.find(name);
    for (std::size_t i = 0; i < info.bytes; ++i) total += std::to_integer<unsigned>(info.data[i]);
  }
  return total;
}

TEST(Safetensors, DamagedFilesLoadOrThrow) {
  const std::string original = valid_image();
  TemporaryFolder folder;
  std::mt19937 random(20240607);
  int loaded = 0;
  int refused = 0;
  for (int round = 0; round < 1500; ++round) {
    std::string content = original;
    for (unsigned edits = 1 + random() % 4; edits > 0; --edits) {
      const std::size_t place = random() % content.size();
      switch (random() % 4) {
        case 0:
          content[place] = static_cast<char>(content[place] ^ (1 << random() % 8));
          break;
        case 1:
          content[place] = static_cast<char>(random() % 256);
          break;
        case 2:
          // Digits and punctuation get past the JSON parser far more often than any byte does.
          content[place] = "0123456789,:[]{}\"-"[random() % 18];
          break;
        default:
          content.resize(place + 1);
      }
    }
    folder.write("model.safetensors", content);
    try {
      checksum(SafetensorsFolder::open(folder.path()));
      ++loaded;
    } catch (const kvzap::Error&) {
      ++refused;
    }
  }
  EXPECT_GT(loaded, 0);
  EXPECT_GT(refused, 0);
}

}  // namespace
