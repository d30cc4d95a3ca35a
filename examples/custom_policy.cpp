// An eviction policy of one's own, used without a change to kvzap. It evicts half of the context's
// pairs by the norms of their values, in prefill of a whole model. docs/developers/policies.md
// explains it.
#include <Kokkos_Core.hpp>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <kvzap/engine/generate.hpp>
#include <kvzap/engine/policies.hpp>
#include <kvzap/model/tokenizer.hpp>
#include <memory>
#if KVZAP_HAVE_MPI
#include <mpi.h>
#endif

namespace {

// [policy]
/// Scores a pair by its value's 1-norm, the factor that VATP (arXiv 2406.12335) gives attention:
/// scores(head, row) = sum_d |v(row, d)|. Time O(rows * head_dim), no extra memory.
class ValueNorm final : public kvzap::Policy {
 public:
  void score(kvzap::PolicyLayer& layer, const ScoreView& scores) override {
    for (int head = 0; head < layer.heads(); ++head) {
      const auto values = layer.values(head);  // (row, head_dim), a float copy
      const auto width = values.extent(1);
      const auto out = scores;
      Kokkos::parallel_for(
          "value_norm::score",
          Kokkos::RangePolicy<kvzap::ExecutionSpace>(layer.exec(), 0, layer.rows(head)),
          KOKKOS_LAMBDA(std::int64_t row) {
            float norm = 0;
            for (std::size_t d = 0; d < width; ++d) norm += fabsf(values(row, d));
            out(head, row) = norm;
          });
    }
  }
};

kvzap::PolicyInfo value_norm() {
  kvzap::PolicyInfo info;
  info.name = "value-norm";
  info.paper = "VATP's value norm, arXiv 2406.12335";
  info.formula = "||v||_1";
  info.needs = "values";
  info.cost = "O(rows * head_dim), no extra memory";
  info.judges_tokens = true;  // a row's score never changes, so that a threshold can judge it
  info.scores_parts = true;   // and it is the same in whatever part of a sequence it lies
  info.make = [](const kvzap::PolicyArguments&, const kvzap::PolicySetup&) -> kvzap::PolicyMaker {
    return [] { return std::make_unique<ValueNorm>(); };
  };
  return info;
}
// [policy]

int run() {
  const std::string inputs = KVZAP_INPUTS;
  const std::string folder = inputs + "/models/recall-4m";
  const auto comm = kvzap::Communicator::world();
  const auto config = kvzap::ModelConfig::load(folder);
  const auto partition =
      kvzap::HeadPartition::even(static_cast<int>(config.num_hidden_layers),
                                 static_cast<int>(config.num_key_value_heads), comm.size());
  const auto model = std::make_shared<const kvzap::Model>(
      kvzap::Model::load(folder, config, kvzap::DType::f32, partition, comm.rank()));

  std::ifstream file(inputs + "/demo-context.txt");
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const auto tokens = kvzap::Tokenizer::load(folder).encode(text);

  const kvzap::PolicyInfo info = value_norm();
  kvzap::PolicyChoice choice;
  choice.name = info.name;
  choice.info = &info;
  choice.make = info.make({}, {config, partition, kvzap::DType::f32, folder, comm});
  choice.budget.amount = kvzap::Budget::Amount::evict_ratio;
  choice.budget.evict_ratio = 0.5;

  kvzap::CacheOptions options;
  options.pruning.mode = kvzap::PruneMode::prefill;
  options.policy = std::make_shared<const kvzap::PolicyChoice>(choice);
  const auto generator = kvzap::Generator::create(model, nullptr, options, comm);
  generator->prefill(tokens, /*reusable*/ false);

  const auto report = generator->report();
  const auto half = static_cast<std::int64_t>(tokens.size() / 2);
  bool good = 2 * report.live_bytes <= report.full_bytes;
  for (const auto& layer : report.kept) {
    for (const auto rows : layer) good = good && rows == half;
  }
  if (comm.is_root()) {
    std::printf("%zu tokens: every head keeps %lld, %lld bytes instead of %lld, %s\n",
                tokens.size(), static_cast<long long>(half),
                static_cast<long long>(report.live_bytes),
                static_cast<long long>(report.full_bytes), good ? "right" : "WRONG");
  }
  return good ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
#if KVZAP_HAVE_MPI
  MPI_Init(&argc, &argv);
#endif
  int status = 1;
  {
    Kokkos::ScopeGuard kokkos(argc, argv);
    try {
      status = run();
    } catch (const kvzap::Error& error) {
      std::fprintf(stderr, "custom_policy: %s\n", error.what());
      kvzap::Communicator::world().abort(1);
    }
  }
#if KVZAP_HAVE_MPI
  MPI_Finalize();
#endif
  return status;
}
