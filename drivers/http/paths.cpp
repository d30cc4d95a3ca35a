#include "http/paths.hpp"

#include <algorithm>
#include <map>
#include <vector>

#include "files/nearest.hpp"

namespace kvzap::driver {
namespace {

using server::Endpoint;
using Methods = Path::Methods;

const std::vector<Path>& paths() {
  static const std::vector<Path> all = {
      {"/", Methods::get, false, {}, true},
      {"/health", Methods::get, false, {}, true},
      {"/metrics"},
      {"/openapi.json"},
      {"/v1/models"},
      {one_model, Methods::get, true},
      {"/kvzap/status"},
      {"/v1/chat/completions", Methods::post, false, Endpoint::chat},
      {"/v1/completions", Methods::post, false, Endpoint::completions},
      {"/v1/responses", Methods::post, false, Endpoint::responses},
      {one_response, Methods::get_and_delete, true},
      {"/v1/messages", Methods::post, false, Endpoint::messages},
      {"/v1/messages/count_tokens", Methods::post},
      {"/v1/embeddings", Methods::post, false, Endpoint::embeddings},
      {"/v1/score", Methods::post, false, Endpoint::score},
      {"/v1/rerank", Methods::post, false, Endpoint::rerank},
      {"/tokenize", Methods::post},
      {"/detokenize", Methods::post}};
  return all;
}

/// The methods that a path takes.
std::vector<std::string> methods_of(const Path& path) {
  std::vector<std::string> methods;
  for (const char* const method : {"GET", "HEAD", "POST", "DELETE"}) {
    if (path.takes(method)) methods.emplace_back(method);
  }
  return methods;
}

/// Returns the path that a client may mean, or "".
std::string meant_path(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  static const std::map<std::string, std::string> others = {
      {"/api/chat", "/v1/chat/completions"},  // Ollama
      {"/api/generate", "/v1/completions"},
      {"/api/tags", "/v1/models"},
      {"/api/embed", "/v1/embeddings"},
      {"/completion", "/v1/completions"},  // llama.cpp
      {"/embedding", "/v1/embeddings"},
      {"/reranking", "/v1/rerank"},
      {"/v2/rerank", "/v1/rerank"},  // vLLM
      // A client of Anthropic's protocol whose base URL ends with /v1.
      {"/v1/v1/messages", "/v1/messages"}};
  if (const auto found = others.find(path); found != others.end()) return found->second;
  const auto is_known = [](const std::string& name) {
    return std::any_of(paths().begin(), paths().end(),
                       [&](const Path& one) { return one.name == name; });
  };
  for (const std::string& known : {path, "/v1" + path}) {
    if (is_known(known)) return known;
  }
  constexpr std::size_t longest = 64, most_edits = 3;
  for (const Path& known : paths()) {
    if (known.name.size() <= 2 * most_edits || path.size() > longest) continue;
    if (files::edit_distance(path, known.name) <= most_edits) return known.name;
  }
  return {};
}

}  // namespace

bool Path::takes(std::string_view method) const {
  if (posts()) return method == "POST";
  return method == "GET" || method == "HEAD" ||
         (method == "DELETE" && methods == Methods::get_and_delete);
}

const char* Path::allowed() const {
  return posts() ? "POST" : methods == Methods::get ? "GET, HEAD" : "GET, HEAD, DELETE";
}

const Path* path_of(const std::string& path) {
  for (const Path& one : paths()) {
    const bool fits = one.ends_with_name ? path.rfind(one.name, 0) == 0 : path == one.name;
    if (fits) return &one;
  }
  return nullptr;
}

std::vector<server::OpenApiPath> described_paths(bool has_keys) {
  std::vector<server::OpenApiPath> described;
  for (const Path& path : paths()) {
    described.push_back({path.name + (path.ends_with_name ? "{name}" : ""), methods_of(path),
                         has_keys && !path.is_open, is_messages_path(path.name)});
  }
  return described;
}

std::string unknown_path(const std::string& path) {
  const std::string meant = meant_path(path);
  return meant.empty() ? "unknown path; expected one of OpenAI's, as /v1/chat/completions"
                       : "unknown path; expected " + meant;
}

bool is_messages_path(const std::string& path) {
  const std::string name = "/v1/messages";
  return path.compare(0, name.size(), name) == 0 &&
         (path.size() == name.size() || path[name.size()] == '/');
}

}  // namespace kvzap::driver
