// A grammar as automata that call each other: what a recogniser runs.
#pragma once

#include <cstdint>
#include <vector>

#include "grammar/expression.hpp"
#include "grammar/finite_automaton.hpp"

namespace kvzap::grammar {

using NodeIndex = std::uint32_t;

/// A state of a rule's automaton.
struct Node {
  RuleId rule = -1;
  bool is_final = false;
  /// It neither ends its rule nor calls another.
  bool has_bytes_alone = false;
  std::vector<FiniteAutomaton::ByteEdge> bytes;
  std::vector<FiniteAutomaton::TokenEdge> tokens;
  std::vector<FiniteAutomaton::CallEdge> calls;

  /// The node that follows `byte`, or null.
  const NodeIndex* next(unsigned char byte) const {
    for (const auto& edge : bytes) {
      if (byte <= edge.last) return byte >= edge.first ? &edge.target : nullptr;
    }
    return nullptr;
  }
};

struct RuleInfo {
  NodeIndex start = 0;
  bool is_nullable = false;  // matches the empty text
  /// A rule that repeats another has one node and no edges: the recogniser counts.
  bool is_repeat = false;
  RuleId body = -1;
  std::int64_t least = 0, most = 0;
  /// Only repeats call it.
  bool is_body = false;
};

struct Automaton {
  std::vector<Node> nodes;
  std::vector<RuleInfo> rules;
  RuleId root = 0;
};

/// Returns automata in which each node can reach the end of its rule. Throws Error if a rule is not
/// defined, if no text matches, or if the grammar is too large.
Automaton compile(const Grammar& grammar);

}  // namespace kvzap::grammar
