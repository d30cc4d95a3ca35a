#include "commands/support/generator_setup.hpp"

#include <kvzap/engine/learn_from_texts.hpp>

#include "base/stopwatch.hpp"
#include "console/console.hpp"
#include "parallel/message.hpp"

namespace kvzap::driver {

std::unique_ptr<Generator> make_generator(const RunOptions& options, const Texts& texts,
                                          const ModelSetup& setup, const Communicator& comm,
                                          const ProgressCallback& progress, RunReport& report) {
  const CacheOptions& cache = report.cache_options;
  auto start = base::Clock::now();
  const auto model = load_model(setup, dtype_from_name(options.dtype), options.random_weights,
                                weight_storage_from_name(options.weights), comm, progress);
  std::unique_ptr<Generator> generator;
  comm.agree([&] { generator = Generator::create(model, cache.scorer(), cache, comm); });
  report.weight_bytes = parallel::all_gather(comm, static_cast<std::int64_t>(model->bytes()));
  report.load_seconds = base::seconds_since(start);
  if (!texts.empty()) {
    start = base::Clock::now();
    learn_from_texts(model, *cache.policy, texts, comm, progress);
    report.texts_seconds = base::seconds_since(start);
    report.texts = static_cast<std::int64_t>(texts.size());
  }
  return generator;
}

void warn_of_lookup(const Engine& engine, std::int64_t lookup, bool talks) {
  const std::string why = engine.why_no_drafts();
  if (!talks || lookup == 0 || why.empty()) return;
  say("kvzap: warning: --lookup has no effect: {}\n", why);
}

}  // namespace kvzap::driver
