#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <numeric>
#include <utility>

#include "files/base64.hpp"
#include "files/json_file.hpp"
#include "server/embedding_form.hpp"
#include "server/reply_writers.hpp"

namespace kvzap::server {
namespace {

double dot(const std::vector<float>& a, const std::vector<float>& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0, std::plus<>(),
                            [](double x, double y) { return x * y; });
}

/// Gives a vector the Euclidean norm 1, as OpenAI's have it. Zeros stay.
void normalise(std::vector<float>& vector) {
  const double norm = std::sqrt(dot(vector, vector));
  if (norm == 0) return;
  for (float& number : vector) number = static_cast<float>(number / norm);
}

/// The numbers as JSON or, in base64, as a JSON string of their bytes (little-endian floats).
std::string numbers_text(const std::vector<float>& vector, bool in_base64) {
  if (!in_base64) {
    std::string text = "[";
    for (const float number : vector) {
      if (text.size() > 1) text += ',';
      fmt::format_to(std::back_inserter(text), "{}", number);
    }
    return text + "]";
  }
  std::string bytes(vector.size() * sizeof(float), '\0');
  for (std::size_t i = 0; i < vector.size(); ++i) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, &vector[i], sizeof bits);
    for (std::size_t b = 0; b < sizeof bits; ++b) {
      bytes[i * sizeof bits + b] = static_cast<char>(bits >> (8 * b) & 0xFF);
    }
  }
  return '"' + files::to_base64(bytes) + '"';
}

/// Of /v1/embeddings, /v1/score and /v1/rerank, which have no streams.
class EmbeddingWriter final : public ReplyWriter {
 public:
  EmbeddingWriter(const ApiRequest& request, const ServedModel& model, std::int64_t id,
                  std::int64_t created)
      : ReplyWriter(request),
        m_endpoint(request.endpoint),
        m_form(request.embedding),
        m_model(model.name),
        m_id(id),
        m_created(created) {}

  std::string body(const std::vector<Whole>& answers) override {
    std::vector<std::vector<float>> vectors;
    std::vector<Ending> endings;
    for (const Whole& answer : answers) {
      vectors.push_back(answer.embedding);
      normalise(vectors.back());
      endings.push_back(answer.ending);
    }
    const std::int64_t tokens = count(endings).prompt;
    const Json usage = {{"prompt_tokens", tokens}, {"total_tokens", tokens}};
    if (m_endpoint == Endpoint::embeddings) return embeddings(vectors, usage);
    return files::json_text(m_endpoint == Endpoint::score ? score(vectors, usage)
                                                          : rerank(vectors, usage));
  }

  std::string begin(int) override { return {}; }
  std::string piece(int, const std::string&, const std::vector<TokenText>&) override { return {}; }
  std::string end(int, const Ending&) override { return {}; }
  std::string finish(const std::vector<Ending>&) override { return {}; }
  std::string failure(const std::string&) override { return {}; }

 private:
  /// The vectors are written without a tree of JSON, which would take many times their memory.
  std::string embeddings(const std::vector<std::vector<float>>& vectors, const Json& usage) const {
    std::string text = R"({"object":"list","data":[)";
    for (std::size_t i = 0; i < vectors.size(); ++i) {
      text += fmt::format(R"({}{{"object":"embedding","index":{},"embedding":{}}})",
                          i == 0 ? "" : ",", i, numbers_text(vectors[i], m_form->in_base64));
    }
    return text + fmt::format(R"(],"model":{},"usage":{}}})", files::json_text(Json(m_model)),
                              files::json_text(usage));
  }

  /// The cosines of the first texts with the others.
  std::vector<double> cosines(const std::vector<std::vector<float>>& vectors) const {
    std::vector<double> scores;
    for (std::size_t i = m_form->n_first; i < vectors.size(); ++i) {
      const std::size_t first = m_form->n_first == 1 ? 0 : i - m_form->n_first;
      scores.push_back(std::clamp(dot(vectors[first], vectors[i]), -1.0, 1.0));
    }
    return scores;
  }

  Json score(const std::vector<std::vector<float>>& vectors, const Json& usage) const {
    Json json = {{"id", fmt::format("score-{}", m_id)},
                 {"object", "list"},
                 {"created", m_created},
                 {"model", m_model},
                 {"data", Json::array()},
                 {"usage", usage}};
    for (const double one : cosines(vectors)) {
      json["data"].push_back({{"index", json["data"].size()}, {"object", "score"}, {"score", one}});
    }
    return json;
  }

  Json rerank(const std::vector<std::vector<float>>& vectors, const Json& usage) const {
    const std::vector<double> scores = cosines(vectors);
    std::vector<std::size_t> order(scores.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return scores[a] > scores[b]; });
    order.resize(std::min(order.size(), m_form->most_results));
    Json json = {{"id", fmt::format("rerank-{}", m_id)},
                 {"model", m_model},
                 {"usage", usage},
                 {"results", Json::array()}};
    for (const std::size_t i : order) {
      Json one = {{"index", i}, {"relevance_score", scores[i]}};
      if (m_form->returns_documents) one["document"] = {{"text", m_form->documents[i]}};
      json["results"].push_back(std::move(one));
    }
    return json;
  }

  Endpoint m_endpoint;
  std::shared_ptr<const EmbeddingForm> m_form;
  std::string m_model;
  std::int64_t m_id, m_created;
};

}  // namespace

std::unique_ptr<ReplyWriter> make_embedding_writer(const ApiRequest& request,
                                                   const ServedModel& model, std::int64_t id,
                                                   std::int64_t created) {
  return std::make_unique<EmbeddingWriter>(request, model, id, created);
}

}  // namespace kvzap::server
