#include "json_mutator.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <random>
#include <utility>
#include <vector>

namespace kvzap::fuzz {
namespace {

using Json = nlohmann::ordered_json;

class Mutation {
 public:
  explicit Mutation(unsigned seed) : m_random(seed) {}

  void change(Json& root) {
    m_nodes.clear();
    collect(root);
    Json& node = any();
    switch (below(8)) {
      case 0:
        node = value();
        break;
      case 1:  // another part of the tree in its place
        node = Json(any());
        break;
      case 2:
        if (node.is_structured() && !node.empty()) {
          node.erase(std::next(node.begin(), static_cast<std::ptrdiff_t>(below(node.size()))));
        } else {
          node = nullptr;
        }
        break;
      case 3:
        if (node.is_array()) {
          node.push_back(Json(any()));
        } else if (node.is_object()) {
          rename(node);
        } else {
          vary(node);
        }
        break;
      case 4:
        if (node.is_object()) {
          node[name()] = Json(any());
        } else {
          node = Json::array({Json(node), value()});
        }
        break;
      case 5:
        node = Json(any()).is_structured() ? Json::object({{name(), Json(node)}}) : value();
        break;
      default:
        vary(node);
    }
  }

  std::size_t below(std::size_t end) { return m_random() % end; }

 private:
  void collect(Json& node) {
    m_nodes.push_back(&node);
    if (!node.is_structured()) return;
    for (Json& child : node) collect(child);
  }
  Json& any() { return *m_nodes[below(m_nodes.size())]; }

  std::string name() {  // one that is there, most of the time
    for (int i = 0; i < 8; ++i) {
      const Json& node = any();
      if (node.is_object() && !node.empty()) {
        return std::next(node.begin(), static_cast<std::ptrdiff_t>(below(node.size()))).key();
      }
      if (node.is_string()) return node.get<std::string>();
    }
    return "type";
  }

  void rename(Json& object) {
    const std::string from = name(), to = bytes(from);
    if (!object.contains(from)) return;
    Json held = object[from];
    object.erase(from);
    object[to] = std::move(held);
  }

  Json value() {
    static const std::vector<Json> values = {nullptr,
                                             true,
                                             false,
                                             0,
                                             1,
                                             2,
                                             -1,
                                             0.5,
                                             1e-300,
                                             1e300,
                                             1e38,
                                             1e39,
                                             255,
                                             256,
                                             65536,
                                             2147483647,
                                             2147483648U,
                                             4294967296U,
                                             INT64_MAX,
                                             INT64_MIN,
                                             UINT64_MAX,
                                             "",
                                             "a",
                                             " ",
                                             Json::array(),
                                             Json::object(),
                                             Json::array({0, 4})};
    return values[below(values.size())];
  }

  void vary(Json& node) {
    if (node.is_boolean()) {
      node = !node.get<bool>();
    } else if (node.is_number_integer()) {
      const auto number = node.get<std::uint64_t>();
      const std::uint64_t by = std::uint64_t{1} << below(64);
      node = static_cast<std::int64_t>(below(2) == 0 ? number + by : number - by);
      if (below(4) == 0) node = number + 1;
      if (below(8) == 0) node = static_cast<double>(number) * 1.5;
    } else if (node.is_number_float()) {
      const double factors[] = {-1, 2, 0.5, 1e6, 1e-6, 1e200};
      node = node.get<double>() * factors[below(6)];
    } else if (node.is_string()) {
      node = bytes(node.get<std::string>());
    } else if (node.is_array() && node.size() > 1) {
      std::swap(node[below(node.size())], node[below(node.size())]);
    } else {
      node = value();
    }
  }

  // libFuzzer's mutations, with what it has seen the reader compare.
  static std::string bytes(const std::string& text) {
    std::string changed = text;
    const std::size_t most = text.size() + 16;
    changed.resize(most);
    changed.resize(
        LLVMFuzzerMutate(reinterpret_cast<std::uint8_t*>(changed.data()), text.size(), most));
    return changed;
  }

  std::minstd_rand m_random;
  std::vector<Json*> m_nodes;
};

}  // namespace

std::string mutated_json(std::string_view text, unsigned seed) {
  Json root = Json::parse(text.begin(), text.end(), nullptr, false);
  if (root.is_discarded()) return {};
  Mutation mutation(seed);
  for (std::size_t i = mutation.below(4) + 1; i-- > 0;) mutation.change(root);
  return root.dump(-1, ' ', false, Json::error_handler_t::ignore);
}

std::size_t mutate_json_input(std::uint8_t* data, std::size_t size, std::size_t max_size,
                              unsigned seed) {
  if (seed % 4 == 0) return LLVMFuzzerMutate(data, size, max_size);
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const std::size_t end = std::min(input.find('\0'), size);
  const std::string rest(input.substr(end));
  const std::string text = mutated_json(input.substr(0, end), seed / 4);
  if (text.empty() || text.size() + rest.size() > max_size) {
    return LLVMFuzzerMutate(data, size, max_size);
  }
  std::memcpy(data, text.data(), text.size());
  std::memcpy(data + text.size(), rest.data(), rest.size());
  return text.size() + rest.size();
}

}  // namespace kvzap::fuzz
