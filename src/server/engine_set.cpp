#include <algorithm>
#include <kvzap/server/engine_set.hpp>

namespace kvzap::server {

std::vector<Engine*> EngineSet::all() const {
  std::vector<Engine*> engines = {&m_first};
  for (const auto& other : m_others) engines.push_back(other.get());
  return engines;
}

Engine& EngineSet::of(const PageFormat& format) {
  for (Engine* const engine : all()) {
    if (engine->options().page_format == format) return *engine;
  }
  if (!m_make) throw Error("the server has no engine for this type of keys and values");
  m_others.push_back(m_make(format));
  return *m_others.back();
}

/// What the others have allocated, an engine may not take.
void EngineSet::share_limit() {
  const std::size_t limit = m_first.options().kv_limit;
  if (limit == 0 || m_others.empty()) return;
  const std::size_t allocated = allocated_bytes();
  for (Engine* const engine : all()) {
    const std::size_t by_others = allocated - engine->bytes().allocated;
    engine->set_kv_limit(limit - std::min(by_others, limit - 1));
  }
}

void EngineSet::trim() {
  for (Engine* const engine : all()) engine->trim();
}

std::size_t EngineSet::allocated_bytes() const {
  std::size_t bytes = 0;
  for (const Engine* const engine : all()) bytes += engine->bytes().allocated;
  return bytes;
}

std::size_t EngineSet::free_bytes() {
  share_limit();
  std::size_t bytes = 0;
  for (const Engine* const engine : all()) bytes += engine->free_bytes();
  const std::size_t limit = m_first.options().kv_limit;
  if (limit == 0) return bytes;
  // Each engine counts what nobody has allocated.
  const std::size_t allocated = allocated_bytes();
  const std::size_t counted_again = m_others.size() * (limit - std::min(limit, allocated));
  return bytes - std::min(bytes, counted_again);
}

std::size_t EngineSet::used_bytes() {
  const std::size_t free = free_bytes();
  const std::size_t limit = m_first.options().kv_limit;
  const std::size_t whole = limit == 0 ? allocated_bytes() : limit;
  return whole - std::min(whole, free);
}

}  // namespace kvzap::server
