#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "files/quote.hpp"
#include "server/chat_form.hpp"
#include "server/embedding_form.hpp"

namespace kvzap::server {
namespace {

/// Adds the prompts of a field, and returns their number.
std::size_t add_prompts(const Json& json, const char* field, const ServedModel& model,
                        ApiRequest& request) {
  std::vector<Prompt> prompts =
      prompts_of(json, field, model.max_inputs, model, request.prompt_texts);
  PruneWish none;
  none.prune = PruneMode::none;
  GenerationRequest generation;  // for each prompt
  generation.max_new_tokens = 0;
  generation.pooling = model.pooling;
  generation.pruning = model.pruning_of(none);
  generation.page_format = model.page_format_of(none);
  for (Prompt& prompt : prompts) {
    request.prompt_tokens += tokens_of(prompt);
    generation.prompt = std::move(prompt);
    request.generations.push_back(generation);
  }
  return prompts.size();
}

void read_embeddings(const Json& json, const ServedModel& model, ApiRequest& request,
                     EmbeddingForm& form) {
  if (const Json* const format = field_of(json, "encoding_format")) {
    form.in_base64 = is_text(format, "base64");
    if (!form.in_base64 && !is_text(format, "float")) {
      refuse("encoding_format", R"("float" or "base64")", *format);
    }
  }
  add_prompts(json, "input", model, request);
}

void read_score(const Json& json, const ServedModel& model, ApiRequest& request,
                EmbeddingForm& form) {
  form.n_first = add_prompts(json, "text_1", model, request);
  const std::size_t others = add_prompts(json, "text_2", model, request);
  const auto most = static_cast<std::size_t>(model.max_inputs) + 1;
  if (form.n_first + others > most) {
    throw BadRequest("text_2", fmt::format("text_1 and text_2 have {} texts; expected at most {}",
                                           form.n_first + others, most));
  }
  if (form.n_first == 1 || form.n_first == others) return;
  throw BadRequest("text_1", fmt::format("text_1 has {} texts; expected 1, or {} as text_2 has",
                                         form.n_first, others));
}

void read_rerank(const Json& json, const ServedModel& model, ApiRequest& request,
                 EmbeddingForm& form) {
  const Json* const query = field_of(json, "query");
  if (!query || !query->is_string()) refuse("query", "a string", query);
  const Json* const documents = field_of(json, "documents");
  if (!documents || !documents->is_array() || documents->empty()) {
    refuse("documents", "an array of strings", documents);
  }
  for (const Json& document : *documents) form.documents.push_back(text_of(document, "documents"));
  form.n_first = add_prompts(json, "query", model, request);
  add_prompts(json, "documents", model, request);
  const auto all = static_cast<std::int64_t>(form.documents.size());
  const std::int64_t most = integer_of(json, "top_n", limits::top_n, 0);
  form.most_results = static_cast<std::size_t>(most == 0 ? all : std::min(most, all));
  form.returns_documents = bool_of(json, "return_documents", true);
}

}  // namespace

Json unsupported_embedding_fields(const ServedModel& model) {
  Json fields = Json::parse(R"({
    "truncate_prompt_tokens": [], "add_special_tokens": [true], "normalize": [true],
    "embd_normalize": [2], "messages": [], "kvzap": [], "pooling": []})");
  Json whole = Json::array();
  if (model.hidden_size > 0) whole.push_back(model.hidden_size);
  fields["dimensions"] = std::move(whole);
  return fields;
}

ApiRequest embedding_request(const Json& json, Endpoint endpoint, const ServedModel& model) {
  const Json unsupported = unsupported_embedding_fields(model);
  for (const auto& [name, neutral] : unsupported.items()) {
    refuse_field(json, name.c_str(), neutral);
  }
  ApiRequest request;
  request.endpoint = endpoint;
  EmbeddingForm form;
  if (endpoint == Endpoint::embeddings) {
    read_embeddings(json, model, request, form);
  } else if (endpoint == Endpoint::score) {
    read_score(json, model, request, form);
  } else {
    read_rerank(json, model, request, form);
  }
  request.prompts = static_cast<int>(request.generations.size());
  request.embedding = std::make_shared<const EmbeddingForm>(std::move(form));
  return request;
}

}  // namespace kvzap::server
