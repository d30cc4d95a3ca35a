// Places the kept rows of a model's heads on ranks that do not exist, with the engine's own
// partition and plan of moves. perf/scale computes the time of steps from the result.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <kvzap/core/head_partition.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/page_plan.hpp"
#include "engine/shared_heads.hpp"

namespace kvzap::perf {
namespace {

using nlohmann::json;
using Rows = std::vector<std::vector<std::vector<std::int64_t>>>;  // (sequence, layer, head)

constexpr const char* usage =
    "Usage: replay_placement < INPUT.json\n"
    "Places kept rows on ranks as the engine does, and prints the loads of each layer as JSON.\n"
    "INPUT: {\"rows\": [sequence][layer][KV head], \"ranks\": [N, ...], \"group\": query heads of\n"
    "a KV head, \"head_dim\": N, \"page_rows\": N, \"window\": rows of a ring, \"tolerance\": X,\n"
    "\"placement\": \"even\" or \"balanced\"}\n";

struct Input {
  Rows rows;
  std::vector<int> ranks;
  std::int64_t group = 1, head_dim = 1, page_rows = 1, window = 0;
  double tolerance = 0;
  bool is_balanced = false;
  int layers() const { return static_cast<int>(rows.front().size()); }
  int heads() const { return static_cast<int>(rows.front().front().size()); }
};

std::int64_t number(const json& input, const char* name, std::int64_t least) {
  const auto value = input.at(name).get<std::int64_t>();
  if (value < least) {
    throw Error(fmt::format("{} is {}; expected at least {}", name, value, least));
  }
  return value;
}

void check(const Input& input) {
  if (input.rows.empty() || input.rows.front().empty() || input.rows.front().front().empty()) {
    throw Error("rows: there is no sequence, layer or head");
  }
  for (std::size_t s = 0; s < input.rows.size(); ++s) {
    const auto& layers = input.rows[s];
    for (std::size_t l = 0; l < layers.size(); ++l) {
      if (layers.size() != input.rows.front().size() ||
          layers[l].size() != input.rows.front().front().size()) {
        throw Error(fmt::format("rows: sequence {} has another number of layers or heads", s));
      }
      for (const std::int64_t rows : layers[l]) {
        if (rows < 0) {
          throw Error(
              fmt::format("rows: sequence {} layer {} has {}; expected 0 or more", s, l, rows));
        }
      }
    }
  }
  for (const int ranks : input.ranks) {
    if (ranks < 1) throw Error(fmt::format("ranks has {}; expected at least 1", ranks));
  }
}

Input read(std::istream& stream) {
  const json given = json::parse(stream);
  Input input;
  input.rows = given.at("rows").get<Rows>();
  input.ranks = given.at("ranks").get<std::vector<int>>();
  input.group = number(given, "group", 1);
  input.head_dim = number(given, "head_dim", 1);
  input.page_rows = number(given, "page_rows", 1);
  input.window = number(given, "window", 0);
  input.tolerance = given.at("tolerance").get<double>();
  if (!(input.tolerance >= 0)) throw Error("tolerance: expected 0 or more");
  const auto placement = given.at("placement").get<std::string>();
  if (placement != "even" && placement != "balanced") {
    throw Error(fmt::format("placement is '{}'; expected even or balanced", placement));
  }
  input.is_balanced = placement == "balanced";
  check(input);
  return input;
}

HeadPartition partition_of(const Input& input, int ranks) {
  if (!input.is_balanced) return HeadPartition::even(input.layers(), input.heads(), ranks);
  auto sums = input.rows.front();
  for (std::size_t s = 1; s < input.rows.size(); ++s) {
    for (int l = 0; l < input.layers(); ++l) {
      for (int h = 0; h < input.heads(); ++h) sums[l][h] += input.rows[s][l][h];
    }
  }
  return HeadPartition::balanced(sums, ranks);
}

engine::LayerPlan plan_of(const Input& input, const HeadPartition& partition, int layer) {
  std::vector<int> owners(input.heads());
  for (int r = 0; r < partition.n_ranks(); ++r) {
    for (const int head : partition.heads(layer, r)) owners[head] = r;
  }
  std::vector<engine::HeadPages> heads;
  for (const auto& sequence : input.rows) {
    for (int h = 0; h < input.heads(); ++h) {
      engine::HeadPages head;
      head.owner = owners[h];
      head.rows = sequence[layer][h];
      head.full = std::max<std::int64_t>(0, head.rows - input.window) / input.page_rows;
      head.available = head.full;
      heads.push_back(head);
    }
  }
  return {partition.n_ranks(), input.page_rows, std::move(heads)};
}

/// What the exchange of a layer's partial attention costs the busiest rank.
struct Exchange {
  std::int64_t sent = 0, received = 0;  // floats of a token to and from other ranks
  std::int64_t messages = 0;            // ranks that it sends to, or receives from
};

/// members[h][r]: whether rank r has rows of head h.
Exchange exchange_of(const engine::SharedHeads& places, int layer, int ranks,
                     const std::vector<std::vector<char>>& members) {
  const auto heads = static_cast<int>(members.size());
  std::vector<std::vector<std::pair<int, std::int64_t>>> targets(heads);  // rank, floats
  std::vector<std::int64_t> floats(heads, 0), counts(heads, 0);
  for (int r = 0; r < ranks; ++r) {
    for (const auto& piece : places.pieces(layer, r)) {
      targets[piece.head].emplace_back(r, piece.record());
      floats[piece.head] += piece.record();
    }
    for (int h = 0; h < heads; ++h) counts[h] += members[h][r];
  }
  Exchange most;
  std::vector<int> seen(ranks, -1);
  for (int r = 0; r < ranks; ++r) {
    std::int64_t sent = 0, received = 0, to = 0, from = 0;
    for (int h = 0; h < heads; ++h) {
      if (members[h][r] == 0) continue;
      sent += floats[h];
      for (const auto& [target, record] : targets[h]) {
        if (target == r) {
          sent -= record;
        } else if (seen[target] != r) {
          seen[target] = r;
          ++to;
        }
      }
    }
    std::vector<char> sources;
    for (const auto& piece : places.pieces(layer, r)) {
      received += (counts[piece.head] - members[piece.head][r]) * piece.record();
      if (sources.empty()) {
        sources = members[piece.head];
      } else {
        for (int s = 0; s < ranks; ++s) sources[s] |= members[piece.head][s];
      }
    }
    if (!sources.empty()) {
      sources[r] = 0;
      from = std::count(sources.begin(), sources.end(), 1);
    }
    most.sent = std::max(most.sent, sent);
    most.received = std::max(most.received, received);
    most.messages = std::max({most.messages, to, from});
  }
  return most;
}

json replay_layer(const Input& input, const HeadPartition& partition,
                  const engine::SharedHeads& places, int layer) {
  const int ranks = partition.n_ranks();
  engine::LayerPlan plan = plan_of(input, partition, layer);
  const auto largest = [&] { return *std::max_element(plan.loads().begin(), plan.loads().end()); };
  std::int64_t total = 0, moved = 0;
  for (const std::int64_t load : plan.loads()) total += load;
  const std::int64_t before = largest();
  while (const auto move = plan.next(input.tolerance, std::int64_t{1} << 40)) {
    plan.apply(*move);
    moved += move->pages;
  }
  std::vector<std::vector<char>> members(input.heads(), std::vector<char>(ranks, 0));
  bool is_shared = partition.deals_projections();
  for (std::size_t i = 0; i < plan.heads().size(); ++i) {
    auto& ranks_of_head = members[i % input.heads()];
    ranks_of_head[plan.heads()[i].owner] = 1;
    for (const auto& run : plan.heads()[i].away) {
      ranks_of_head[run.rank] = 1;
      is_shared = true;
    }
  }
  std::int64_t after = 0;
  for (const std::int64_t load : plan.loads()) after += load;
  if (after != total) throw Error(fmt::format("layer {}: rows were lost", layer));
  json layer_json = {{"rows", total},  {"before", before},       {"after", largest()},
                     {"moved", moved}, {"is_shared", is_shared}, {"sent", 0},
                     {"received", 0},  {"messages", 0}};
  if (is_shared) {
    const Exchange most = exchange_of(places, layer, ranks, members);
    layer_json["sent"] = most.sent;
    layer_json["received"] = most.received;
    layer_json["messages"] = most.messages;
  }
  return layer_json;
}

json replay(const Input& input, int ranks) {
  const HeadPartition partition = partition_of(input, ranks);
  const engine::SharedHeads::Sizes sizes{input.group, input.head_dim, input.head_dim};
  const engine::SharedHeads places(partition, std::vector<engine::SharedHeads::Sizes>(
                                                  static_cast<std::size_t>(input.layers()), sizes));
  json layers = json::array();
  for (int l = 0; l < input.layers(); ++l) {
    layers.push_back(replay_layer(input, partition, places, l));
  }
  return {{"ranks", ranks}, {"layers", layers}};
}

}  // namespace
}  // namespace kvzap::perf

int main(int argc, char** argv) {
  if (argc > 1) {
    const bool is_help = std::string(argv[1]) == "--help";
    std::fputs(kvzap::perf::usage, is_help ? stdout : stderr);
    return is_help ? 0 : 2;
  }
  try {
    const auto input = kvzap::perf::read(std::cin);
    nlohmann::json output = nlohmann::json::array();
    for (const int ranks : input.ranks) output.push_back(kvzap::perf::replay(input, ranks));
    std::cout << output.dump() << "\n";
  } catch (const std::exception& error) {
    std::cerr << "replay_placement: standard input: " << error.what() << "\n";
    return 1;
  }
  return 0;
}
