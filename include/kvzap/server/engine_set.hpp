// The engines of a server: one for each type of cached rows, under one limit of memory.
#pragma once

#include <cstddef>
#include <functional>
#include <kvzap/engine/engine.hpp>
#include <memory>
#include <utility>
#include <vector>

namespace kvzap::server {

/// Engines of one model whose caches differ in CacheOptions::page_format. The caches share the
/// kv_limit of the first engine. Every rank has one, and makes the same calls.
class EngineSet {
 public:
  /// Makes an engine that differs from the first one in its format alone. Collective.
  using Make = std::function<std::unique_ptr<Engine>(const PageFormat&)>;

  /// `first` must outlive the set. Without `make` there are no others.
  explicit EngineSet(Engine& first, Make make = {}) : m_first(first), m_make(std::move(make)) {}

  Engine& first() const { return m_first; }
  /// Whether `of` can return an engine with this format.
  bool can_have(const PageFormat& format) const {
    return m_make || format == m_first.options().page_format;
  }
  /// Returns the engine with this format. Makes it if it does not exist: collective. Throws the
  /// errors of Make.
  Engine& of(const PageFormat& format);
  /// All engines, the first one first.
  std::vector<Engine*> all() const;

  /// Runs `work`, which takes memory of `engine`. If it throws Unchanged, which says that it ran
  /// out of memory and has changed nothing, the other engines return what they do not use, and
  /// `work` runs again. Collective.
  template <class Unchanged = AgreedOutOfMemory, class Work>
  auto within_limit(Engine& engine, const Work& work) {
    share_limit();
    if (m_others.empty()) return work();
    try {
      return work();
    } catch (const Unchanged&) {
      for (Engine* const other : all()) {
        if (other != &engine) other->trim();
      }
      share_limit();
    }
    return work();
  }
  /// Returns unused memory of all engines to the system.
  void trim();

  /// Bytes of this rank's pages, rings and states.
  std::size_t allocated_bytes() const;
  /// Bytes that this rank can still take within the limit, about; see Engine::free_bytes.
  std::size_t free_bytes();
  /// Bytes of this rank's pages in use, rings and states, about.
  std::size_t used_bytes();

 private:
  void share_limit();

  Engine& m_first;
  Make m_make;
  std::vector<std::unique_ptr<Engine>> m_others;
};

}  // namespace kvzap::server
