#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <kvzap/server/openapi.hpp>
#include <limits>
#include <map>
#include <utility>

#include "files/ascii.hpp"
#include "files/json_file.hpp"
#include "server/chat_form.hpp"
#include "server/embedding_form.hpp"
#include "server/openapi_texts.hpp"

namespace kvzap::server {
namespace {

/// The values of the marks "@NAME" in openapi_requests.
std::map<std::string, Json> limits_of(const ServedModel& model) {
  std::map<std::string, Json> values = {
      {"model", model.name},
      {"choices", model.max_choices},
      {"prompts", model.max_prompts},
      {"inputs", model.max_inputs},
      {"last_token",
       model.vocabulary > 0 ? model.vocabulary - 1 : std::numeric_limits<TokenId>::max()},
      {"seed.least", std::numeric_limits<std::int64_t>::min()},
      {"seed.most", std::numeric_limits<std::uint64_t>::max()},
      {"stops", limits::stops},
      {"stop_bytes", limits::stop_bytes},
      {"token_rules", limits::token_rules},
      {"parts", limits::parts},
      {"messages", limits::messages},
      {"tools", limits::tools},
      {"calls", limits::calls},
      {"tool_name", limits::tool_name},
      {"guided_choices", limits::choices}};
  const auto add = [&](const std::string& name, const auto& range) {
    values[name + ".least"] = range.least;
    values[name + ".most"] = range.most;
  };
  add("temperature", limits::temperature);
  add("share", limits::share);
  add("penalty", limits::penalty);
  add("repetition_penalty", limits::repetition_penalty);
  add("bias", limits::bias);
  add("top_k", limits::top_k);
  add("best_of", limits::best_of);
  add("min_tokens", limits::min_tokens);
  add("keep_tokens", limits::keep_tokens);
  add("logprobs", limits::logprobs);
  add("max_tokens", limits::max_tokens);
  add("top_n", limits::top_n);
  return values;
}

void set_limits(Json& json, const std::map<std::string, Json>& values) {
  if (json.is_structured()) {
    for (Json& member : json) set_limits(member, values);
  } else if (json.is_string() && json.get_ref<const std::string&>().rfind('@', 0) == 0) {
    json = values.at(json.get_ref<const std::string&>().substr(1));
  }
}

/// Lets a schema of a property take null, too.
void allow_null(Json& schema) {
  const auto type = schema.find("type");
  if (const auto list = schema.find("enum"); list != schema.end()) list->push_back(nullptr);
  if (type != schema.end()) {
    if (!type->is_array()) *type = Json::array({*type});
    type->push_back("null");
  } else if (const auto any = schema.find("anyOf"); any != schema.end()) {
    any->push_back({{"type", "null"}});
  } else if (!schema.contains("enum")) {
    schema = {{"anyOf", Json::array({schema, {{"type", "null"}}})}};
  }
}

/// Lets all properties that are not required be null, here and in the schemas within.
void allow_nulls(Json& json) {
  if (!json.is_structured()) return;
  for (Json& member : json) allow_nulls(member);
  if (!json.is_object() || !json.contains("properties")) return;
  const Json required = json.value("required", Json::array());
  for (const auto& [name, schema] : json["properties"].items()) {
    if (std::find(required.begin(), required.end(), name) == required.end()) allow_null(schema);
  }
}

/// The fields of chats that the endpoint does not have.
std::vector<std::string> fields_without(const std::string& endpoint) {
  if (endpoint == "messages") return {std::begin(not_in_messages), std::end(not_in_messages)};
  if (endpoint == "responses") return {std::begin(not_in_responses), std::end(not_in_responses)};
  return {};
}

/// Adds the properties of included schemas. They stand before the schemas that include them.
void include_properties(Json& schema, const Json& schemas) {
  const Json endpoint = take_field(schema, "without");
  const auto without = fields_without(endpoint.is_string() ? endpoint.get<std::string>() : "");
  for (const Json& other : take_field(schema, "includes")) {
    for (const auto& [name, value] :
         schemas.at(other.get<std::string>()).at("properties").items()) {
      if (std::find(without.begin(), without.end(), name) != without.end()) continue;
      schema["properties"].emplace(name, Json(value));
    }
  }
}

/// Adds fields that take the values alone that have no effect: these and `empty` ones.
void add_unsupported(const Json& fields, const Json& empty, Json& schema) {
  for (const auto& [name, neutral] : fields.items()) {
    Json values = neutral;
    for (const Json& value : empty) {
      if (std::find(values.begin(), values.end(), value) == values.end()) values.push_back(value);
    }
    schema["properties"][name] = {{"description", "Not supported."}, {"enum", std::move(values)}};
  }
}

Json request_schemas(const ServedModel& model) {
  Json schemas = files::parse_own_json(openapi_requests);
  constexpr const char *of_answers = "AnswerFields", *of_vectors = "EmbeddingFields";
  const Json empty = {Json::array(), Json::object()};
  add_unsupported(unsupported_embedding_fields(model), empty, schemas[of_vectors]);
  add_unsupported(unsupported_fields(), {Json(""), empty[0], empty[1]}, schemas[of_answers]);
  for (auto& [name, schema] : schemas.items()) include_properties(schema, schemas);
  schemas.erase(of_answers);
  schemas.erase(of_vectors);
  set_limits(schemas, limits_of(model));
  allow_nulls(schemas);
  return schemas;
}

Json reference(const Json& name) {
  return {{"$ref", "#/components/schemas/" + name.get<std::string>()}};
}

Json content(const char* type, Json schema) { return {{type, {{"schema", std::move(schema)}}}}; }

Json success(const Json& operation) {
  const Json text = {{"type", "string"}};
  Json reply = {{"description", "The reply"}};
  if (operation.contains("reply")) {
    reply["content"] = content("application/json", reference(operation["reply"]));
  } else {
    reply["content"] = content(operation.at("type").get_ref<const std::string&>().c_str(), text);
  }
  if (operation.contains("event")) {
    // OpenAPI 3.1 has no schema for the events of a stream.
    Json stream = {{"schema", text}, {"x-event-schema", reference(operation["event"])}};
    reply["description"] = "The reply; with \"stream\": true the events of a stream";
    reply["content"]["text/event-stream"] = std::move(stream);
  }
  return reply;
}

/// The responses for errors of an operation.
Json errors(const OpenApiPath& path, const std::string& method) {
  std::map<std::string, const char*> meanings = {
      {"400", "The request is wrong"},
      {"403", "The request names another host, or comes from another server's page"},
      {"503", "The server is loading, ending or busy"},
      {"default", "Another error"}};
  const bool posts = method == "POST", names = path.path.find('{') != std::string::npos;
  if (path.needs_key) {
    meanings["401"] = "The key is missing or wrong";
    meanings["429"] = "The queue is full, or the address has sent too many wrong keys";
  }
  if (posts || names) meanings["404"] = "There is no model or response of this name";
  if (posts) {
    meanings["413"] = "The body is too large";
    meanings["415"] = "The body is compressed or a form";
    meanings["429"] = "The queue is full, or the address has sent too many wrong keys";
    meanings["500"] = "The server has failed";
  }
  const Json schema = reference(path.is_messages ? "MessagesError" : "Error");
  Json responses;
  for (const auto& [status, meaning] : meanings) {
    Json& one = responses[status];
    one = {{"description", meaning}, {"content", content("application/json", schema)}};
    if (status != "429" && status != "503") continue;
    one["headers"]["Retry-After"] = {{"description", "Seconds"}, {"schema", {{"type", "integer"}}}};
  }
  return responses;
}

/// Returns the operation of a method at a path.
Json operation_of(const OpenApiPath& path, const std::string& method, const Json& operations) {
  const bool is_head = method == "HEAD";
  const std::string key = is_head ? "get" : files::lower_case(method);
  const Json* const of_path = field_of(operations, path.path.c_str());
  const Json* const found = of_path ? field_of(*of_path, key.c_str()) : nullptr;
  if (!found) throw Error(fmt::format("openapi: {} {} has no description", method, path.path));
  Json operation;
  operation["operationId"] = found->at("operationId").get<std::string>() + (is_head ? "Head" : "");
  operation["summary"] = found->at("summary");
  if (path.needs_key) {
    operation["security"] = Json::array({{{"bearer", Json::array()}}, {{"key", Json::array()}}});
  }
  if (path.path.find("{name}") != std::string::npos) {
    operation["parameters"] = Json::array({{{"name", "name"},
                                            {"in", "path"},
                                            {"required", true},
                                            {"schema", {{"type", "string"}, {"minLength", 1}}}}});
  }
  if (found->contains("request")) {
    operation["requestBody"] = {
        {"required", true},
        {"content", content("application/json", reference(found->at("request")))}};
  }
  operation["responses"] = {{"200", success(*found)}};
  operation["responses"].update(errors(path, method));
  if (is_head) {
    for (Json& response : operation["responses"]) response.erase("content");
  }
  return operation;
}

}  // namespace

std::string openapi_document(const ServedModel& model, const std::vector<OpenApiPath>& paths,
                             const std::string& version) {
  const Json operations = files::parse_own_json(openapi_operations);
  Json document;
  document["openapi"] = "3.1.0";
  document["info"] = {
      {"title", "kvzap serve"},
      {"version", version},
      {"description",
       "OpenAI's and Anthropic's protocols over a pruned KV cache. Fields of requests that are "
       "not listed have no effect. A field that is null is absent."}};
  Json& described = document["paths"] = Json::object();
  for (const OpenApiPath& path : paths) {
    for (const std::string& method : path.methods) {
      described[path.path][files::lower_case(method)] = operation_of(path, method, operations);
    }
  }
  Json& components = document["components"];
  components["schemas"] = request_schemas(model);
  components["schemas"].update(files::parse_own_json(openapi_replies));
  components["schemas"]["Document"] = {{"type", "object"}};
  components["securitySchemes"] = {
      {"bearer", {{"type", "http"}, {"scheme", "bearer"}}},
      {"key", {{"type", "apiKey"}, {"in", "header"}, {"name", "x-api-key"}}}};
  return files::json_text(document);
}

}  // namespace kvzap::server
