// The loop of an engine with its own model code. kvzap provides the cache and the attention over
// it.
//
// The example runs several sequences with all layers: prefill, then decode -> score -> append ->
// next step, with pruning in each step. It also forks a sequence, restores a checkpoint, and
// returns memory to the system.
#include <Kokkos_Core.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <kvzap/core/attention.hpp>
#include <kvzap/core/cache.hpp>
#include <random>
#include <string>
#include <vector>

namespace {

using kvzap::ExecutionSpace;
using kvzap::MemorySpace;
// Type of stored keys and values: float, kvzap::half or kvzap::bfloat16. Queries, scores and
// attention's output are float in any case.
using Value = float;

using Matrix = Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace>;
using Heads = Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace>;
using Rows = Kokkos::View<Value***, Kokkos::LayoutRight, MemorySpace>;

// ---- The engine's own model: a small transformer with random weights ----------------------------

constexpr int n_layers = 3, n_kv_heads = 2, group = 3, head_dim = 64, vocabulary = 96;
constexpr int n_heads = n_kv_heads * group, width = 128;

Matrix random_matrix(const std::string& label, int rows, int columns, std::mt19937& random) {
  Matrix matrix(label, rows, columns);
  const auto host = Kokkos::create_mirror_view(matrix);
  std::normal_distribution<float> normal(0, 1 / std::sqrt(static_cast<float>(columns)));
  for (std::size_t i = 0; i < host.size(); ++i) host.data()[i] = normal(random);
  Kokkos::deep_copy(matrix, host);
  return matrix;
}

struct Layer {
  Matrix queries, keys, values, output;
  Matrix scores;  // predicts from the state that enters attention how much a pair matters
};

struct Model {
  Matrix embedding, head;
  std::vector<Layer> layers;
  explicit Model(std::mt19937& random)
      : embedding(random_matrix("embedding", vocabulary, width, random)),
        head(random_matrix("head", vocabulary, width, random)) {
    for (int l = 0; l < n_layers; ++l) {
      layers.push_back({random_matrix("queries", n_heads * head_dim, width, random),
                        random_matrix("keys", n_kv_heads * head_dim, width, random),
                        random_matrix("values", n_kv_heads * head_dim, width, random),
                        random_matrix("output", width, n_heads * head_dim, random),
                        random_matrix("scores", n_kv_heads, width, random)});
    }
  }
};

/// y (row, N) = x (row, K) * weights (N, K)^T, or y += it. An engine has a library for this.
void multiply(const ExecutionSpace& exec, const Matrix& x, const Matrix& weights, const Matrix& y,
              bool adds = false) {
  const auto depth = x.extent(1);
  Kokkos::parallel_for(
      "engine::multiply",
      Kokkos::MDRangePolicy<ExecutionSpace, Kokkos::Rank<2>>(
          exec, {0, 0},
          {static_cast<std::int64_t>(y.extent(0)), static_cast<std::int64_t>(y.extent(1))}),
      KOKKOS_LAMBDA(std::int64_t row, std::int64_t column) {
        float sum = adds ? y(row, column) : 0;
        for (std::size_t k = 0; k < depth; ++k) sum += x(row, k) * weights(column, k);
        y(row, column) = sum;
      });
}

/// normed = x / its root mean square, per row.
void normalize(const ExecutionSpace& exec, const Matrix& x, const Matrix& normed) {
  Kokkos::parallel_for(
      "engine::normalize", Kokkos::RangePolicy<ExecutionSpace>(exec, 0, x.extent(0)),
      KOKKOS_LAMBDA(std::int64_t row) {
        float sum = 0;
        for (int i = 0; i < width; ++i) sum += x(row, i) * x(row, i);
        const float factor = 1 / sqrtf(sum / width + 1e-6f);
        for (int i = 0; i < width; ++i) normed(row, i) = factor * x(row, i);
      });
}

KOKKOS_INLINE_FUNCTION float rope_angle(std::int64_t position, int d) {
  return static_cast<float>(position) * powf(10000, -2.0f * static_cast<float>(d) / head_dim);
}

/// heads (row, head, dim) = flat (row, head * dim), rotated by RoPE if the row's position is given.
template <class Out>
void shape_heads(const ExecutionSpace& exec, const Matrix& flat, const Out& heads,
                 const Kokkos::View<const std::int64_t*, MemorySpace>& positions = {}) {
  const bool turns = positions.extent(0) > 0;
  const auto n = heads.extent(1);
  using Element = typename Out::non_const_value_type;
  Kokkos::parallel_for(
      "engine::shape_heads", Kokkos::RangePolicy<ExecutionSpace>(exec, 0, flat.extent(0)),
      KOKKOS_LAMBDA(std::int64_t row) {
        for (std::size_t head = 0; head < n; ++head) {
          for (int d = 0; d < head_dim / 2; ++d) {
            const float a = flat(row, head * head_dim + d);
            const float b = flat(row, head * head_dim + d + head_dim / 2);
            const float angle = turns ? rope_angle(positions(row), d) : 0;
            const float c = cosf(angle), s = sinf(angle);
            heads(row, head, d) = static_cast<Element>(a * c - b * s);
            heads(row, head, d + head_dim / 2) = static_cast<Element>(b * c + a * s);
          }
        }
      });
}

template <class T>
Kokkos::View<const T*, MemorySpace> on_device(const std::vector<T>& host) {
  const Kokkos::View<T*, MemorySpace> copy("copy", host.size());
  Kokkos::deep_copy(copy, Kokkos::View<const T*, Kokkos::HostSpace>(host.data(), host.size()));
  return copy;
}

/// Returns x (row, width), the rows of the table for these tokens.
Matrix embed(const ExecutionSpace& exec, const Matrix& table, const std::vector<int>& tokens) {
  const Matrix x("x", tokens.size(), width);
  const auto ids = on_device(tokens);
  Kokkos::parallel_for(
      "engine::embed", Kokkos::RangePolicy<ExecutionSpace>(exec, 0, tokens.size()),
      KOKKOS_LAMBDA(std::int64_t row) {
        for (int i = 0; i < width; ++i) x(row, i) = table(ids(row), i);
      });
  return x;
}

/// scores (head, row) = by_row (row, head).
void transpose(const ExecutionSpace& exec, const Matrix& by_row, const Matrix& scores) {
  Kokkos::parallel_for(
      "engine::transpose", Kokkos::RangePolicy<ExecutionSpace>(exec, 0, by_row.extent(0)),
      KOKKOS_LAMBDA(std::int64_t row) {
        for (int head = 0; head < n_kv_heads; ++head) scores(head, row) = by_row(row, head);
      });
}

// ---- The engine: steps of any mix of sequences over one cache -----------------------------------

/// The tokens that a sequence runs in a step: a whole prompt, or the last generated token.
struct Work {
  kvzap::SequenceId sequence;
  std::vector<int> tokens;
};

class Engine {
 public:
  Engine(const Model& model, const kvzap::EvictionRule& rule)
      : m_model(model), m_rule(rule), m_cache(kvzap::DType::f32, shape()) {}

  kvzap::KVCache& cache() { return m_cache; }

  /// Runs one step and returns the logits (one row per piece of work) of the last tokens.
  std::vector<std::vector<float>> step(const std::vector<Work>& work) {
    // The rows of all sequences are consecutive, so one pass over the weights serves all of them.
    std::vector<int> tokens;
    std::vector<std::int64_t> positions;
    std::vector<kvzap::StepSpan> step_spans;
    std::vector<kvzap::AppendSpan> append_spans;
    for (const Work& part : work) {
      const auto first = static_cast<std::int64_t>(tokens.size());
      const auto rows = static_cast<std::int64_t>(part.tokens.size());
      const std::int64_t before = m_cache.tokens(part.sequence, 0);
      for (std::int64_t i = 0; i < rows; ++i) positions.push_back(before + i);
      tokens.insert(tokens.end(), part.tokens.begin(), part.tokens.end());
      step_spans.push_back({part.sequence, rows});
      append_spans.push_back({part.sequence, first, rows, m_rule, /*scored*/ true});
    }
    const auto n = static_cast<int>(tokens.size());
    const Matrix x = embed(m_exec, m_model.embedding, tokens);
    const auto where = on_device(positions);
    const Matrix normed("normed", n, width), flat_q("q", n, n_heads * head_dim),
        flat_kv("kv", n, n_kv_heads * head_dim), scores_by_row("scores by row", n, n_kv_heads);
    const Matrix scores("scores", n_kv_heads, n);
    const Heads queries("queries", n, n_heads, head_dim), output("output", n, n_heads, head_dim);
    const Rows keys("keys", n, n_kv_heads, head_dim), values("values", n, n_kv_heads, head_dim);

    // Takes the memory of the step for all layers. OutOfMemory leaves everything unchanged.
    m_cache.begin_step(m_exec, step_spans);
    for (int l = 0; l < n_layers; ++l) {
      const Layer& layer = m_model.layers[l];
      normalize(m_exec, x, normed);
      multiply(m_exec, normed, layer.queries, flat_q);
      shape_heads(m_exec, flat_q, queries, where);
      multiply(m_exec, normed, layer.keys, flat_kv);
      shape_heads(m_exec, flat_kv, keys, where);
      multiply(m_exec, normed, layer.values, flat_kv);
      shape_heads(m_exec, flat_kv, values);

      // Decode attention: every sequence's new tokens attend to the rows that it still has, and to
      // each other.
      std::vector<kvzap::AttentionSpan> spans;
      for (const kvzap::AppendSpan& span : append_spans) {
        spans.push_back({m_cache.layer(span.sequence, l), span.first_row, span.rows, span.first_row,
                         span.rows});
      }
      m_attention(m_exec, spans, queries, keys, values, output);
      multiply(m_exec, Matrix(output.data(), n, n_heads * head_dim), layer.output, x, true);

      // Scores the new pairs from the input of attention and appends them. Pairs that leave the
      // window are judged by their scores, and stay or are dropped.
      multiply(m_exec, normed, layer.scores, scores_by_row);
      transpose(m_exec, scores_by_row, scores);
      m_cache.append(m_exec, append_spans, l, keys, values, scores);
    }
    m_cache.end_step();

    normalize(m_exec, x, normed);
    const Matrix logits("logits", n, vocabulary);
    multiply(m_exec, normed, m_model.head, logits);
    const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, logits);
    std::vector<std::vector<float>> last;
    for (const kvzap::AppendSpan& span : append_spans) {
      const float* row = &host(span.first_row + span.rows - 1, 0);
      last.emplace_back(row, row + vocabulary);
    }
    return last;
  }

 private:
  static kvzap::CacheShape shape() {
    kvzap::CacheShape shape;
    shape.heads.assign(n_layers, n_kv_heads);
    shape.head_dim = head_dim;
    shape.window = 32;
    shape.page_rows = 16;
    return shape;
  }

  ExecutionSpace m_exec;
  const Model& m_model;
  kvzap::EvictionRule m_rule;
  kvzap::KVCache m_cache;
  kvzap::Attention m_attention{kvzap::DType::f32};
};

// ---- The expected result: the same model over plain lists ---------------------------------------

auto on_host(const Matrix& matrix) {
  return Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, matrix);
}
using HostMatrix = decltype(on_host(Matrix()));

/// Runs one sequence, token by token. Every head has a list of its pairs.
class Reference {
 public:
  Reference(const Model& model, const kvzap::EvictionRule& rule, int window)
      : m_rule(rule), m_window(window), m_pairs(n_layers * n_kv_heads) {
    m_embedding = on_host(model.embedding);
    m_head = on_host(model.head);
    for (const Layer& layer : model.layers) {
      m_layers.push_back({on_host(layer.queries), on_host(layer.keys), on_host(layer.values),
                          on_host(layer.output), on_host(layer.scores)});
    }
  }

  std::vector<double> step(const std::vector<int>& tokens) {
    std::vector<double> x;
    for (const int token : tokens) {
      x.assign(&m_embedding(token, 0), &m_embedding(token, 0) + width);
      for (int l = 0; l < n_layers; ++l) run_layer(l, x);
      ++m_tokens;
    }
    // As in the cache, a pair that leaves the window is judged once.
    for (auto& pairs : m_pairs) {
      const auto goes = [&](Pair& pair) {
        if (pair.is_judged || pair.position >= m_tokens - m_window) return false;
        pair.is_judged = true;
        return !m_rule.keeps(static_cast<float>(pair.score), pair.position);
      };
      pairs.erase(std::remove_if(pairs.begin(), pairs.end(), goes), pairs.end());
    }
    return product(m_head, normalized(x));
  }

  std::size_t rows(int layer, int head) const { return m_pairs[layer * n_kv_heads + head].size(); }

 private:
  struct HostLayer {
    HostMatrix queries, keys, values, output, scores;
  };
  struct Pair {
    std::vector<double> key, value;
    double score;
    std::int64_t position;
    bool is_judged = false;
  };

  static std::vector<double> product(const HostMatrix& weights, const std::vector<double>& x) {
    std::vector<double> y(weights.extent(0));
    for (std::size_t i = 0; i < y.size(); ++i) {
      for (std::size_t k = 0; k < x.size(); ++k) y[i] += weights(i, k) * x[k];
    }
    return y;
  }
  static std::vector<double> normalized(std::vector<double> x) {
    double sum = 0;
    for (const double value : x) sum += value * value;
    for (double& value : x) value /= std::sqrt(sum / width + 1e-6);
    return x;
  }
  /// Returns head `head` of `flat`, rotated.
  std::vector<double> turned(const std::vector<double>& flat, int head) const {
    std::vector<double> result(head_dim);
    for (int d = 0; d < head_dim / 2; ++d) {
      const double angle = rope_angle(m_tokens, d);
      const double a = flat[head * head_dim + d], b = flat[head * head_dim + d + head_dim / 2];
      result[d] = a * std::cos(angle) - b * std::sin(angle);
      result[d + head_dim / 2] = b * std::cos(angle) + a * std::sin(angle);
    }
    return result;
  }

  void run_layer(int l, std::vector<double>& x) {
    const HostLayer& layer = m_layers[l];
    const auto normed = normalized(x);
    const auto q = product(layer.queries, normed), k = product(layer.keys, normed);
    const auto v = product(layer.values, normed), scores = product(layer.scores, normed);
    std::vector<double> output(n_heads * head_dim);
    for (int kv = 0; kv < n_kv_heads; ++kv) {
      auto& pairs = m_pairs[l * n_kv_heads + kv];
      pairs.push_back({turned(k, kv),
                       {v.begin() + kv * head_dim, v.begin() + (kv + 1) * head_dim},
                       scores[kv],
                       m_tokens});
      for (int head = kv * group; head < (kv + 1) * group; ++head) {
        const auto query = turned(q, head);
        double sum = 0;
        std::vector<double> mean(head_dim);
        for (const Pair& pair : pairs) {
          double dot = 0;
          for (int d = 0; d < head_dim; ++d) dot += query[d] * pair.key[d];
          const double weight = std::exp(dot / std::sqrt(double{head_dim}));
          sum += weight;
          for (int d = 0; d < head_dim; ++d) mean[d] += weight * pair.value[d];
        }
        for (int d = 0; d < head_dim; ++d) output[head * head_dim + d] = mean[d] / sum;
      }
    }
    const auto added = product(layer.output, output);
    for (int i = 0; i < width; ++i) x[i] += added[i];
  }

  HostMatrix m_embedding, m_head;
  std::vector<HostLayer> m_layers;
  kvzap::EvictionRule m_rule;
  std::int64_t m_window, m_tokens = 0;
  std::vector<std::vector<Pair>> m_pairs;  // for each layer's heads
};

// ---- The loop -----------------------------------------------------------------------------------

int likeliest(const std::vector<float>& logits) {
  return static_cast<int>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

/// A sequence of the engine, its last token, and the expected result.
struct Client {
  kvzap::SequenceId sequence;
  int last;
  Reference reference;
  std::vector<int> answer;
};

int run() {
  std::mt19937 random(1);
  const Model model(random);
  kvzap::EvictionRule rule;
  rule.threshold = 0;  // about half of these scores are lower
  Engine engine(model, rule);
  auto& cache = engine.cache();
  const int window = cache.shape().window;

  double worst = 0;
  const auto compare = [&](const std::vector<float>& logits, const std::vector<double>& expected) {
    for (std::size_t i = 0; i < logits.size(); ++i) {
      worst = std::fmax(worst, std::fabs(logits[i] - expected[i]));
    }
  };

  // Prefill: three prompts in one step.
  std::vector<Work> prompts;
  for (const int length : {70, 41, 150}) {
    Work prompt{cache.add_sequence(), {}};
    for (int i = 0; i < length; ++i)
      prompt.tokens.push_back(static_cast<int>(random() % vocabulary));
    prompts.push_back(prompt);
  }
  std::vector<Client> clients;
  auto logits = engine.step(prompts);
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    clients.push_back({prompts[i].sequence, likeliest(logits[i]), {model, rule, window}, {}});
    compare(logits[i], clients.back().reference.step(prompts[i].tokens));
  }

  // A second answer to the third prompt, from its second token on with another token. The two share
  // pages.
  const auto pages_before = cache.bytes().allocated;
  Client twin = clients.back();
  twin.sequence = cache.fork(twin.sequence);
  twin.last = (twin.last + 1) % vocabulary;
  clients.push_back(twin);
  std::printf("a fork took %zu bytes, of %zu\n", cache.bytes().allocated - pages_before,
              pages_before);

  // Decode: one token of each sequence per step.
  const auto decode = [&](int steps) {
    for (int i = 0; i < steps; ++i) {
      std::vector<Work> work;
      for (const Client& client : clients) work.push_back({client.sequence, {client.last}});
      logits = engine.step(work);
      for (std::size_t c = 0; c < clients.size(); ++c) {
        compare(logits[c], clients[c].reference.step({clients[c].last}));
        clients[c].last = likeliest(logits[c]);
        clients[c].answer.push_back(clients[c].last);
      }
    }
  };
  decode(40);

  // Ten tokens on trial, as in speculative decoding, then undone and run again.
  const Client before = clients[0];
  const auto checkpoint = cache.checkpoint(before.sequence);
  decode(10);
  const Client tried = clients[0];
  cache.restore(before.sequence, checkpoint);
  clients[0] = before;
  decode(10);
  const bool repeats = clients[0].answer == tried.answer;

  // Each head must have the same rows as the lists.
  bool same_rows = true;
  for (const Client& client : clients) {
    std::printf("sequence %d: %lld tokens, rows of each head:", client.sequence,
                static_cast<long long>(cache.tokens(client.sequence, 0)));
    for (int l = 0; l < n_layers; ++l) {
      for (int head = 0; head < n_kv_heads; ++head) {
        const auto rows = static_cast<std::size_t>(cache.rows(client.sequence, l, head));
        same_rows = same_rows && rows == client.reference.rows(l, head);
        std::printf(" %zu", rows);
      }
    }
    std::printf("\n");
  }

  // Two sequences are finished. Their pages are free for others at once, and trim returns unused
  // memory to the system.
  const auto bytes = cache.bytes();
  cache.free_sequence(clients[2].sequence);
  cache.free_sequence(clients[3].sequence);
  const auto returned = cache.trim();
  std::printf("bytes: %zu allocated; two sequences freed: %zu returned, %zu left\n",
              bytes.allocated, returned, cache.bytes().allocated);

  const bool good =
      worst < 1e-4 && repeats && same_rows && cache.bytes().allocated < bytes.allocated;
  std::printf("largest difference from plain lists: %.1e, %s\n", worst, good ? "right" : "WRONG");
  return good ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  Kokkos::ScopeGuard kokkos(argc, argv);
  try {
    return run();
  } catch (const kvzap::Error& error) {
    std::fprintf(stderr, "engine_loop: %s\n", error.what());
    return 1;
  }
}
