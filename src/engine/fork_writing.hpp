// A snapshot of a fork that is written while the engine continues.
#pragma once

#include <functional>
#include <kvzap/engine/snapshot.hpp>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace kvzap::engine {

/// Writes a fork, and frees it as soon as no thread reads it any more.
class ForkWriting final : public SnapshotWriting {
 public:
  /// `context` is read, too, until this object is destroyed.
  ForkWriting(std::unique_ptr<SnapshotWriting> writing, std::shared_ptr<const void> context,
              std::function<void()> free_fork)
      : m_context(std::move(context)),
        m_writing(std::move(writing)),
        m_free_fork(std::move(free_fork)) {}
  ForkWriting(const ForkWriting&) = delete;
  ForkWriting& operator=(const ForkWriting&) = delete;
  ~ForkWriting() override {
    m_writing.reset();  // waits for the writing thread
    free_fork();
  }

  bool advance() override {
    return and_free([&] { return m_writing->advance(); });
  }
  void finish() override {
    and_free([&] {
      m_writing->finish();
      return true;
    });
  }
  std::int64_t file_bytes() const override { return m_writing ? m_writing->file_bytes() : 0; }
  const std::vector<std::string>& notes() const override {
    static const std::vector<std::string> none;
    return m_writing ? m_writing->notes() : none;
  }

 private:
  template <class Work>
  bool and_free(const Work& work) {
    if (!m_writing) throw Error("the snapshot could not be written, which has been said before");
    bool is_finished = false;
    try {
      is_finished = work();
    } catch (...) {
      m_writing.reset();
      free_fork();
      throw;
    }
    if (is_finished) free_fork();
    return is_finished;
  }
  void free_fork() {
    if (m_free_fork) m_free_fork();
    m_free_fork = nullptr;
    m_context.reset();
  }

  std::shared_ptr<const void> m_context;
  std::unique_ptr<SnapshotWriting> m_writing;
  std::function<void()> m_free_fork;
};

}  // namespace kvzap::engine
