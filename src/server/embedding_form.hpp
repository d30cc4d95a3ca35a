// Requests for vectors of texts: /v1/embeddings, and /v1/score and /v1/rerank, which compare
// vectors.
#pragma once

#include <cstddef>
#include <kvzap/server/protocol.hpp>
#include <string>
#include <vector>

#include "server/request_fields.hpp"

namespace kvzap::server {

/// What becomes of the vectors of a request.
struct EmbeddingForm {
  bool in_base64 = false;  // of /v1/embeddings
  // Of the other endpoints: the first texts are compared with the rest, one with all or each with
  // its own.
  std::size_t n_first = 0;
  std::vector<std::string> documents;  // of /v1/rerank
  std::size_t most_results = 0;
  bool returns_documents = true;
};

/// Reads the body of a request to such an endpoint. Throws BadRequest.
ApiRequest embedding_request(const Json& json, Endpoint endpoint, const ServedModel& model);

/// Returns fields of OpenAI's, vLLM's and llama.cpp's requests for vectors that are refused here,
/// each with an array of the values that have no effect.
Json unsupported_embedding_fields(const ServedModel& model);

}  // namespace kvzap::server
