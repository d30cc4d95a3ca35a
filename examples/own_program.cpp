// The program kvzap with an eviction policy of your own: `run`, `chat`, `eval`, `serve` and
// `policies` know it as they know the others. Without arguments it answers the demo's question,
// with half of the context's pairs evicted by this policy, and cuts again while it answers. (A norm
// knows little: the answer is wrong.)
#include <Kokkos_Core.hpp>
#include <cmath>
#include <cstdint>
#include <kvzap/engine/policies.hpp>
#include <kvzap/program.hpp>
#include <memory>
#include <string>
#include <vector>

namespace {

/// Scores a pair by a norm of its value: scores(head, row) = (sum_d |v(row, d)|^p)^(1 / p).
/// Time O(rows * head_dim), no extra memory.
class ValueNorm final : public kvzap::Policy {
 public:
  struct Parameters : kvzap::PolicyParameters {
    std::int64_t p = integer("p", 1, {1, 2}, "power of the norm");
  };
  explicit ValueNorm(const Parameters& parameters) : m_power(parameters.p) {}

  void score(kvzap::PolicyLayer& layer, const ScoreView& scores) override {
    const bool is_square = m_power == 2;
    for (int head = 0; head < layer.heads(); ++head) {
      const auto values = layer.values(head);  // (row, head_dim), a float copy
      const auto width = values.extent(1);
      const auto out = scores;
      Kokkos::parallel_for(
          "value_norm::score",
          Kokkos::RangePolicy<kvzap::ExecutionSpace>(layer.exec(), 0, layer.rows(head)),
          KOKKOS_LAMBDA(std::int64_t row) {
            float sum = 0;
            for (std::size_t d = 0; d < width; ++d) {
              const float value = fabsf(values(row, d));
              sum += is_square ? value * value : value;
            }
            out(head, row) = is_square ? sqrtf(sum) : sum;
          });
    }
  }

 private:
  std::int64_t m_power;
};

kvzap::PolicyInfo value_norm() {
  kvzap::PolicyInfo info;
  info.name = "value-norm";
  info.paper = "VATP's value norm, arXiv 2406.12335";
  info.formula = "||v||_p";
  info.needs = "values";
  info.cost = "O(rows * head_dim), no extra memory";
  info.judges_tokens = true;  // a row's score never changes, so that a threshold can judge it
  info.scores_parts = true;   // and it is the same in whatever part of a sequence it lies
  info.make_class<ValueNorm>();
  return info;
}

}  // namespace

int main(int argc, char** argv) {
  kvzap::add_policy(value_norm());
  if (argc > 1) return kvzap::run_program(argc, argv);
  const std::string inputs = KVZAP_INPUTS;
  std::vector<std::string> words = {
      argv[0],
      "run",
      "-m",
      inputs + "/models/recall-4m",
      "-f",
      inputs + "/demo-context.txt",
      "--question",
      "\n\nWhat is the special magic number for delta?",
      "--policy",
      "value-norm:p=2",
      "--evict-ratio",
      "0.5",
      "-n",
      "16",
      // Every four tokens of the answer, too.
      "--decode-every",
      "4",
      "--decode-evict-ratio",
      "0.5",
  };
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  return kvzap::run_program(static_cast<int>(words.size()), arguments.data());
}
