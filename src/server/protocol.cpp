#include "server/protocol.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "base/json_file.hpp"
#include "base/quote.hpp"

namespace kvzap::server {
namespace {

using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;

constexpr std::size_t most_messages = 4096;
constexpr std::size_t most_parts = 4096;
constexpr std::size_t most_stops = 16;
constexpr std::size_t longest_stop = 1024;
constexpr int most_logprobs = 20;

std::string dump(const OrderedJson& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

[[noreturn]] void refuse(const std::string& field, const std::string& expected, const Json& found) {
  throw BadRequest(field,
                   fmt::format("{} is {}; expected {}", field, detail::described(found), expected));
}

/// A field that is there and not null.
const Json* field_of(const Json& object, const char* name) {
  const auto found = object.find(name);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

bool bool_of(const Json& object, const char* name, bool otherwise) {
  const Json* const field = field_of(object, name);
  if (!field) return otherwise;
  if (!field->is_boolean()) refuse(name, "true or false", *field);
  return field->get<bool>();
}

double number_of(const Json& object, const char* name, double least, double most,
                 double otherwise) {
  const Json* const field = field_of(object, name);
  if (!field) return otherwise;
  const double value = field->is_number() ? field->get<double>() : std::nan("");
  if (!(value >= least && value <= most)) {
    refuse(name, fmt::format("a number from {} to {}", least, most), *field);
  }
  return value;
}

std::int64_t integer_of(const Json& object, const char* name, std::int64_t least, std::int64_t most,
                        std::int64_t otherwise) {
  const Json* const field = field_of(object, name);
  if (!field) return otherwise;
  const bool fits = field->is_number_integer() &&
                    (!field->is_number_unsigned() ||
                     field->get<std::uint64_t>() <=
                         static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()));
  if (!fits || field->get<std::int64_t>() < least || field->get<std::int64_t>() > most) {
    refuse(name, fmt::format("an integer from {} to {}", least, most), *field);
  }
  return field->get<std::int64_t>();
}

std::string text_of(const Json& value, const std::string& name) {
  if (!value.is_string()) refuse(name, "a text", value);
  return value.get<std::string>();
}

/// Fields that ask for what there is not, unless they ask for nothing.
void refuse_unsupported(const Json& body) {
  for (const char* name : {"tools", "functions", "logit_bias", "modalities", "audio", "prediction",
                           "web_search_options", "guided_json", "guided_regex", "guided_choice",
                           "guided_grammar", "suffix"}) {
    const Json* const field = field_of(body, name);
    if (field && !(field->is_string() && field->get_ref<const std::string&>().empty()) &&
        !((field->is_array() || field->is_object()) && field->empty())) {
      throw BadRequest(name, fmt::format("{} is not supported", name));
    }
  }
  if (const Json* const format = field_of(body, "response_format")) {
    const Json* const type = format->is_object() ? field_of(*format, "type") : nullptr;
    if (!type || *type != "text") {
      throw BadRequest("response_format", "response_format is not supported, but for text");
    }
  }
  const std::int64_t choices = integer_of(body, "n", 1, std::numeric_limits<int>::max(), 1);
  if (integer_of(body, "best_of", 1, std::numeric_limits<int>::max(), choices) != choices) {
    throw BadRequest("best_of", "best_of is not supported, but for that of n");
  }
}

std::vector<std::string> stops_of(const Json& body) {
  const Json* const field = field_of(body, "stop");
  std::vector<std::string> stops;
  if (!field) return stops;
  if (field->is_string()) {
    stops.push_back(field->get<std::string>());
  } else if (field->is_array() && field->size() <= most_stops) {
    for (const Json& one : *field) stops.push_back(text_of(one, "stop"));
  } else {
    refuse("stop", fmt::format("a text, or at most {} of them", most_stops), *field);
  }
  for (const std::string& stop : stops) {
    if (!stop.empty() && stop.size() <= longest_stop) continue;
    throw BadRequest("stop", fmt::format("stop has a text of {} bytes; expected 1 to {}",
                                         stop.size(), longest_stop));
  }
  return stops;
}

PruneWish wish_of(const Json& body) {
  PruneWish wish;
  const Json* const field = field_of(body, "kvzap");
  if (!field) return wish;
  if (!field->is_object()) refuse("kvzap", "an object", *field);
  for (const auto& [key, value] : field->items()) {
    if (key == "threshold" || key == "evict_ratio") {
      if (!value.is_number() || !std::isfinite(value.get<double>())) {
        refuse("kvzap." + key, "a number", value);
      }
      (key == "threshold" ? wish.threshold : wish.evict_ratio) = value.get<double>();
    } else if (key == "prune") {
      const std::string name = text_of(value, "kvzap.prune");
      for (const PruneMode mode : {PruneMode::none, PruneMode::prefill, PruneMode::always}) {
        if (name == name_of(mode)) wish.prune = mode;
      }
      if (!wish.prune) refuse("kvzap.prune", "\"none\", \"prefill\" or \"always\"", value);
    } else {
      throw BadRequest("kvzap", fmt::format("kvzap has no field {}; expected threshold, "
                                            "evict_ratio or prune",
                                            detail::in_quotes(key)));
    }
  }
  if (wish.threshold && wish.evict_ratio) {
    throw BadRequest("kvzap", "kvzap has threshold and evict_ratio; expected one of the two");
  }
  return wish;
}

SamplingOptions sampling_of(const Json& body, const ServedModel& model) {
  const SamplingOptions& standard = model.sampling;
  SamplingOptions sampling = standard;
  sampling.temperature = number_of(body, "temperature", 0, 100, standard.temperature);
  sampling.top_p = number_of(body, "top_p", 0, 1, standard.top_p);
  // (As elsewhere, 0 and -1 are all tokens.)
  sampling.top_k = std::max<std::int64_t>(
      0, integer_of(body, "top_k", -1, std::numeric_limits<int>::max(), standard.top_k));
  sampling.min_p = number_of(body, "min_p", 0, 1, standard.min_p);
  sampling.presence_penalty = number_of(body, "presence_penalty", -2, 2, standard.presence_penalty);
  sampling.frequency_penalty =
      number_of(body, "frequency_penalty", -2, 2, standard.frequency_penalty);
  sampling.repetition_penalty =
      number_of(body, "repetition_penalty", 1e-3, 1e3, standard.repetition_penalty);
  if (sampling.top_p == 0) sampling.top_p = std::numeric_limits<double>::min();  // the likeliest
  if (const Json* const seed = field_of(body, "seed")) {
    if (!seed->is_number_integer()) refuse("seed", "an integer", *seed);
    sampling.seed = seed->is_number_unsigned()
                        ? seed->get<std::uint64_t>()
                        : static_cast<std::uint64_t>(seed->get<std::int64_t>());
  } else if (!model.has_seed) {
    std::random_device source;
    sampling.seed = (std::uint64_t{source()} << 32) | source();
  }
  return sampling;
}

struct Messages {
  std::vector<ChatMessage> messages;
  std::vector<std::vector<std::string>> parts;
};

Messages messages_of(const Json& body) {
  const auto found = body.find("messages");
  if (found == body.end()) throw BadRequest("messages", "messages are missing");
  if (!found->is_array() || found->empty() || found->size() > most_messages) {
    refuse("messages", fmt::format("1 to {} messages", most_messages), *found);
  }
  Messages result;
  for (std::size_t i = 0; i < found->size(); ++i) {
    const Json& message = (*found)[i];
    const std::string name = fmt::format("messages[{}]", i);
    if (!message.is_object()) refuse(name, "an object", message);
    const Json* const role = field_of(message, "role");
    const std::string who = role ? text_of(*role, name + ".role") : "";
    ChatMessage one;
    if (who == "system" || who == "developer") {
      one.role = ChatRole::system;
    } else if (who == "user") {
      one.role = ChatRole::user;
    } else if (who == "assistant") {
      one.role = ChatRole::assistant;
    } else {
      throw BadRequest(name + ".role",
                       fmt::format("{}.role is {}; expected \"system\", \"user\" or \"assistant\"",
                                   name, role ? detail::described(*role) : "missing"));
    }
    if (const Json* const calls = field_of(message, "tool_calls"); calls && !calls->empty()) {
      throw BadRequest(name + ".tool_calls", "tool calls are not supported");
    }
    std::vector<std::string> parts;
    const Json* const content = field_of(message, "content");
    if (!content) throw BadRequest(name + ".content", name + ".content is missing");
    if (content->is_string()) {
      parts.push_back(content->get<std::string>());
    } else if (content->is_array() && content->size() <= most_parts) {
      for (const Json& part : *content) {
        const Json* const type = part.is_object() ? field_of(part, "type") : nullptr;
        const Json* const text = part.is_object() ? field_of(part, "text") : nullptr;
        if (!type || *type != "text" || !text) {
          throw BadRequest(name + ".content",
                           fmt::format("{}.content has a part that is no text; other kinds are not "
                                       "supported",
                                       name));
        }
        parts.push_back(text_of(*text, name + ".content.text"));
      }
    } else {
      refuse(name + ".content", "a text or parts", *content);
    }
    for (const std::string& part : parts) one.content += part;
    result.messages.push_back(std::move(one));
    result.parts.push_back(std::move(parts));
  }
  if (result.messages.back().role != ChatRole::user) {
    throw BadRequest("messages", "the last message is not the user's; there is nothing to answer");
  }
  return result;
}

std::vector<TokenId> ids_of(const Json& list, const std::string& name) {
  std::vector<TokenId> ids;
  ids.reserve(list.size());
  for (const Json& id : list) {
    if (!id.is_number_integer() || id.get<std::int64_t>() < 0 ||
        id.get<std::int64_t>() > std::numeric_limits<TokenId>::max()) {
      refuse(name, "token ids, each 0 or more", id);
    }
    ids.push_back(id.get<TokenId>());
  }
  return ids;
}

/// The text, or, in tokens, the ids of a prompt.
std::vector<Segment> prompt_of(const Json& body, const ServedModel& model, std::string& text) {
  const auto found = body.find("prompt");
  if (found == body.end()) throw BadRequest("prompt", "the prompt is missing");
  const Json* prompt = &*found;
  if (prompt->is_array() && prompt->size() == 1 && !prompt->front().is_number()) {
    prompt = &prompt->front();
  }
  std::vector<TokenId> ids;
  if (prompt->is_string()) {
    if (!model.tokenizer) throw BadRequest("prompt", "the model has no tokenizer: token ids only");
    text = prompt->get<std::string>();
    ids = model.tokenizer->encode(text, true);
  } else if (prompt->is_array() && !prompt->empty() && prompt->front().is_number()) {
    ids = ids_of(*prompt, "prompt");
    if (model.tokenizer) text = model.tokenizer->decode(ids);
  } else {
    refuse("prompt", "one text, or one list of token ids", *prompt);
  }
  return {{Segment::Kind::context, std::move(ids), {}}};
}

Json object_of(std::string_view body) {
  Json json;
  try {
    json = detail::parse_json(body, "the body");
  } catch (const Error& error) {
    throw BadRequest("", error.what());
  }
  if (!json.is_object()) throw BadRequest("", "the body is not a JSON object");
  return json;
}

const Tokenizer& tokenizer_of(const ServedModel& model) {
  if (!model.tokenizer) throw BadRequest("", "the model has no tokenizer");
  return *model.tokenizer;
}

const char* finish_reason(EndReason reason) {
  return reason == EndReason::stop_id || reason == EndReason::cut ? "stop" : "length";
}

}  // namespace

std::vector<Segment> segments_of(const std::vector<ChatMessage>& messages,
                                 const std::vector<std::vector<std::string>>& parts, bool thinking,
                                 const ServedModel& model) {
  if (!model.chat_template || !model.tokenizer) {
    throw BadRequest("messages",
                     "the model has no chat template that is known: /v1/completions only");
  }
  const std::string whole = model.chat_template->render(messages, thinking, true);
  // What the template puts between the messages shows where these say nothing that it could change.
  std::vector<ChatMessage> blank = messages;
  const auto mark_of = [](std::size_t i) { return fmt::format("\x01kvzap-message-{}\x01", i); };
  for (std::size_t i = 0; i < blank.size(); ++i) blank[i].content = mark_of(i);
  const std::string glue = model.chat_template->render(blank, thinking, true);
  const auto encode = [&](const std::string& text) { return model.tokenizer->encode(text); };

  std::vector<Segment> segments;
  std::string text;  // of the stretch that is under way
  const auto end = [&](Segment::Kind kind) {
    if (!text.empty()) segments.push_back({kind, encode(text), {}});
    text.clear();
  };
  std::string all;
  std::size_t place = 0;
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const std::string mark = mark_of(i);
    const std::size_t found = glue.find(mark, place);
    if (found == std::string::npos) {
      // A message that the template leaves out, or joins with another.
      segments.clear();
      break;
    }
    const std::string between = glue.substr(place, found - place);
    place = found + mark.size();
    all += between;
    text += between;
    // The content as the template writes it: what follows it in the whole text tells its end.
    const std::string next_mark = i + 1 < messages.size() ? mark_of(i + 1) : "";
    const std::size_t next = next_mark.empty() ? glue.size() : glue.find(next_mark, place);
    const std::string behind =
        next == std::string::npos ? glue.substr(place) : glue.substr(place, next - place);
    std::string content = messages[i].content;
    const auto fits = [&](const std::string& candidate) {
      return whole.compare(all.size(), candidate.size(), candidate) == 0 &&
             whole.compare(all.size() + candidate.size(), behind.size(), behind) == 0;
    };
    bool is_whole = fits(content);
    if (!is_whole) {
      const std::size_t first = content.find_first_not_of(" \t\n\r\f\v");
      const std::size_t last = content.find_last_not_of(" \t\n\r\f\v");
      content = first == std::string::npos ? "" : content.substr(first, last + 1 - first);
      is_whole = fits(content);
    }
    if (!is_whole && messages[i].role == ChatRole::assistant) {
      // Thoughts of earlier turns are left out.
      const std::size_t thought = content.rfind("</think>");
      if (thought != std::string::npos) {
        content = content.substr(thought + 8);
        content.erase(0, std::min(content.find_first_not_of('\n'), content.size()));
        is_whole = fits(content);
      }
    }
    if (!is_whole) {
      segments.clear();
      break;
    }
    all += content;
    const bool is_last = i + 1 == messages.size();
    switch (messages[i].role) {
      case ChatRole::system:
        text += content;
        break;
      case ChatRole::assistant:
        end(Segment::Kind::question);
        text = content;
        end(Segment::Kind::generated);
        break;
      case ChatRole::user: {
        std::size_t total = 0;
        for (const std::string& part : parts[i]) total += part.size();
        const bool has_parts = parts[i].size() > 1 && total == content.size();
        for (std::size_t p = 0; has_parts && p + 1 < parts[i].size(); ++p) {
          text += parts[i][p];
          end(Segment::Kind::context);
        }
        text += has_parts ? parts[i].back() : content;
        // The last part is a question, and what follows belongs to it.
        if (!has_parts) end(Segment::Kind::context);
        break;
      }
    }
    if (is_last) {
      text += behind;
      all += behind;
      end(Segment::Kind::question);
    }
  }
  if (segments.empty() || all != whole) return {{Segment::Kind::context, encode(whole), {}}};
  // A system message at the beginning is what many conversations have in common.
  if (messages.front().role == ChatRole::system && messages.size() > 1) {
    const std::string& system = messages.front().content;
    const std::size_t place_of_it = whole.find(system);
    if (place_of_it != std::string::npos && segments.front().kind == Segment::Kind::context) {
      const auto shared = encode(whole.substr(0, place_of_it + system.size())).size();
      if (shared > 0 && shared < segments.front().tokens.size()) {
        segments.front().cuts.push_back(static_cast<std::int64_t>(shared));
      }
    }
  }
  return segments;
}

ApiRequest parse_request(std::string_view body, bool is_chat, const ServedModel& model) {
  const Json json = object_of(body);
  if (const Json* const name = field_of(json, "model")) {
    const std::string wanted = text_of(*name, "model");
    if (wanted != model.name) {
      throw BadRequest("model",
                       fmt::format("model {} is not served; expected {}", detail::in_quotes(wanted),
                                   detail::in_quotes(model.name)));
    }
  }
  refuse_unsupported(json);
  ApiRequest request;
  request.is_chat = is_chat;
  GenerationRequest& generation = request.generation;
  generation.sampling = sampling_of(json, model);
  generation.choices = static_cast<int>(integer_of(json, "n", 1, model.max_choices, 1));
  generation.setting = model.setting_of(wish_of(json));
  request.stop = stops_of(json);
  if (!request.stop.empty() && !model.tokenizer) {
    throw BadRequest("stop", "the model has no tokenizer: stop texts cannot be found");
  }
  if (!bool_of(json, "ignore_eos", false)) generation.stop_ids = model.stop_ids;
  request.streams = bool_of(json, "stream", false);
  if (const Json* const options = field_of(json, "stream_options")) {
    if (!options->is_object()) refuse("stream_options", "an object", *options);
    request.includes_usage = bool_of(*options, "include_usage", false);
  }
  if (is_chat) {
    if (bool_of(json, "logprobs", false)) {
      request.has_logprobs = true;
      generation.top_logprobs =
          static_cast<int>(integer_of(json, "top_logprobs", 0, most_logprobs, 0));
    } else if (integer_of(json, "top_logprobs", 0, most_logprobs, 0) > 0) {
      throw BadRequest("top_logprobs", "top_logprobs needs logprobs to be true");
    }
    bool thinking = model.thinking;
    if (const Json* const wish = field_of(json, "chat_template_kwargs")) {
      if (!wish->is_object()) refuse("chat_template_kwargs", "an object", *wish);
      thinking = bool_of(*wish, "enable_thinking", thinking);
    }
    const Messages messages = messages_of(json);
    generation.prompt = segments_of(messages.messages, messages.parts, thinking, model);
  } else {
    if (field_of(json, "logprobs")) {
      request.has_logprobs = true;
      generation.top_logprobs = static_cast<int>(integer_of(json, "logprobs", 0, most_logprobs, 0));
    }
    request.echoes = bool_of(json, "echo", false);
    if (request.echoes && request.has_logprobs) {
      throw BadRequest("echo", "echo with logprobs is not supported");
    }
    generation.prompt = prompt_of(json, model, request.prompt_text);
  }
  const std::int64_t count = tokens_of(generation.prompt);
  if (count == 0) throw BadRequest(is_chat ? "messages" : "prompt", "the prompt has no tokens");
  if (model.max_tokens > 0 && count > model.max_tokens) {
    throw BadRequest(is_chat ? "messages" : "prompt",
                     fmt::format("the prompt has {} tokens; the context has room for {}", count,
                                 model.max_tokens));
  }
  constexpr std::int64_t most = std::int64_t{1} << 40;
  const std::int64_t room = model.max_tokens > 0 ? model.max_tokens - count + 1 : most;
  const std::int64_t standard = is_chat ? room : 16;
  const std::int64_t asked = integer_of(json, "max_tokens", 1, most, standard);
  generation.max_new_tokens =
      std::min(room, integer_of(json, "max_completion_tokens", 1, most, asked));
  return request;
}

OrderedJson tokenize(std::string_view body, const ServedModel& model) {
  const Json json = object_of(body);
  const auto content = json.find("content");
  if (content == json.end()) throw BadRequest("content", "content is missing");
  const std::string text = text_of(*content, "content");
  OrderedJson reply;
  reply["tokens"] = tokenizer_of(model).encode(text, bool_of(json, "add_special", false));
  return reply;
}

OrderedJson detokenize(std::string_view body, const ServedModel& model) {
  const Json json = object_of(body);
  const auto tokens = json.find("tokens");
  if (tokens == json.end()) throw BadRequest("tokens", "tokens are missing");
  if (!tokens->is_array()) refuse("tokens", "a list of token ids", *tokens);
  const std::vector<TokenId> ids = ids_of(*tokens, "tokens");
  OrderedJson reply;
  try {
    reply["content"] = tokenizer_of(model).decode(ids, false);
  } catch (const BadRequest&) {
    throw;
  } catch (const Error& error) {
    throw BadRequest("tokens", error.what());
  }
  return reply;
}

std::string error_body(const std::string& what, const std::string& type, const std::string& field) {
  OrderedJson error;
  error["message"] = detail::shown_message(what);
  error["type"] = type;
  error["param"] = field.empty() ? OrderedJson() : OrderedJson(field);
  error["code"] = nullptr;
  return dump({{"error", error}});
}

std::string AnswerText::append(TokenId token) {
  if (m_has_stopped) return {};
  m_held += m_decoder.append(token);
  return release(false);
}

std::string AnswerText::finish() {
  if (m_has_stopped) return {};
  m_held += m_decoder.finish();
  return release(true);
}

std::string AnswerText::release(bool all) {
  std::size_t end = std::string::npos;
  for (const std::string& stop : m_stop) end = std::min(end, m_held.find(stop));
  if (end != std::string::npos) {
    m_has_stopped = true;
    return m_held.substr(0, end);
  }
  std::size_t kept = 0;  // the longest end that may begin a stop text
  for (const std::string& stop : m_stop) {
    const std::size_t most = std::min(stop.size() - 1, m_held.size());
    for (std::size_t count = most; count > kept; --count) {
      if (m_held.compare(m_held.size() - count, count, stop, 0, count) == 0) kept = count;
    }
  }
  if (all) kept = 0;
  std::string said = m_held.substr(0, m_held.size() - kept);
  m_held.erase(0, m_held.size() - kept);
  return said;
}

ReplyWriter::ReplyWriter(const ApiRequest& request, const ServedModel& model, std::int64_t id,
                         std::int64_t created)
    : m_is_chat(request.is_chat),
      m_has_logprobs(request.has_logprobs),
      m_model(model),
      m_id(fmt::format("{}-{}", request.is_chat ? "chatcmpl" : "cmpl", id)),
      m_created(created),
      m_echo(request.echoes ? request.prompt_text : ""),
      m_offsets(static_cast<std::size_t>(request.generation.choices), 0) {}

OrderedJson ReplyWriter::frame(bool is_chunk) const {
  OrderedJson frame;
  frame["id"] = m_id;
  frame["object"] = !m_is_chat ? "text_completion"
                    : is_chunk ? "chat.completion.chunk"
                               : "chat.completion";
  frame["created"] = m_created;
  frame["model"] = m_model.name;
  frame["choices"] = OrderedJson::array();
  return frame;
}

OrderedJson ReplyWriter::choice_of(int choice) const {
  OrderedJson json;
  json["index"] = choice;
  return json;
}

OrderedJson kvzap_of(const Ending& ending) {
  OrderedJson json;
  json["evict_ratio"] = ending.evict_ratio;
  json["kv_bytes"] = ending.kv_bytes;
  json["full_kv_bytes"] = ending.full_kv_bytes;
  return json;
}

OrderedJson ReplyWriter::usage_of(const std::vector<Ending>& endings) const {
  std::int64_t prompt = 0, cached = 0, generated = 0;
  for (const Ending& ending : endings) {
    prompt = std::max(prompt, ending.prompt_tokens);
    generated += ending.new_tokens;
  }
  if (!endings.empty()) cached = endings.front().cached_tokens;
  OrderedJson usage;
  usage["prompt_tokens"] = prompt;
  usage["completion_tokens"] = generated;
  usage["total_tokens"] = prompt + generated;
  usage["prompt_tokens_details"] = {{"cached_tokens", cached}};
  return usage;
}

std::string ReplyWriter::text_of(TokenId token) const {
  return m_model.tokenizer ? m_model.tokenizer->decode({token}, false) : std::to_string(token);
}

OrderedJson ReplyWriter::logprobs_of(const std::vector<TokenText>& tokens,
                                     std::size_t offset) const {
  const auto number = [](float logprob) {
    // JSON has no infinities.
    return std::isfinite(logprob) ? static_cast<double>(logprob) : -9999.0;
  };
  OrderedJson json;
  if (m_is_chat) {
    const auto entry = [&](TokenId token, float logprob) {
      const std::string text = text_of(token);
      OrderedJson one;
      one["token"] = text;
      one["logprob"] = number(logprob);
      // A token may be a part of a character.
      if (text.find("\xef\xbf\xbd") == std::string::npos) {
        one["bytes"] = std::vector<int>();
        for (const char byte : text) one["bytes"].push_back(static_cast<unsigned char>(byte));
      } else {
        one["bytes"] = nullptr;
      }
      return one;
    };
    json["content"] = OrderedJson::array();
    for (const TokenText& token : tokens) {
      OrderedJson one = entry(token.token, token.logprob);
      one["top_logprobs"] = OrderedJson::array();
      for (const auto& [id, logprob] : token.top) {
        one["top_logprobs"].push_back(entry(id, logprob));
      }
      json["content"].push_back(std::move(one));
    }
    return json;
  }
  json["tokens"] = OrderedJson::array();
  json["token_logprobs"] = OrderedJson::array();
  json["top_logprobs"] = OrderedJson::array();
  json["text_offset"] = OrderedJson::array();
  for (const TokenText& token : tokens) {
    const std::string text = text_of(token.token);
    json["tokens"].push_back(text);
    json["token_logprobs"].push_back(number(token.logprob));
    OrderedJson top = OrderedJson::object();
    for (const auto& [id, logprob] : token.top) top[text_of(id)] = number(logprob);
    json["top_logprobs"].push_back(std::move(top));
    json["text_offset"].push_back(offset);
    offset += text.size();
  }
  return json;
}

std::string ReplyWriter::body(const std::vector<Whole>& answers) const {
  OrderedJson json = frame(false);
  std::vector<Ending> endings;
  OrderedJson pruned = OrderedJson::array();
  for (std::size_t i = 0; i < answers.size(); ++i) {
    const Whole& answer = answers[i];
    OrderedJson choice = choice_of(static_cast<int>(i));
    if (m_is_chat) {
      choice["message"]["role"] = "assistant";
      choice["message"]["content"] = answer.text;
    } else {
      choice["text"] = m_echo + answer.text;
    }
    choice["logprobs"] = m_has_logprobs ? logprobs_of(answer.tokens, m_echo.size()) : OrderedJson();
    choice["finish_reason"] = finish_reason(answer.ending.reason);
    choice["kvzap"] = kvzap_of(answer.ending);
    json["choices"].push_back(std::move(choice));
    endings.push_back(answer.ending);
  }
  json["usage"] = usage_of(endings);
  if (!answers.empty()) json["kvzap"] = kvzap_of(answers.front().ending);
  return dump(json);
}

std::string ReplyWriter::begin(int choice) const {
  if (!m_is_chat && m_echo.empty()) return {};
  OrderedJson json = frame(true);
  OrderedJson one = choice_of(choice);
  if (m_is_chat) {
    one["delta"]["role"] = "assistant";
    one["delta"]["content"] = "";
  } else {
    one["text"] = m_echo;
  }
  one["logprobs"] = nullptr;
  one["finish_reason"] = nullptr;
  json["choices"].push_back(std::move(one));
  return "data: " + dump(json) + "\n\n";
}

std::string ReplyWriter::piece(int choice, const std::string& text,
                               const std::vector<TokenText>& tokens) {
  OrderedJson json = frame(true);
  OrderedJson one = choice_of(choice);
  if (m_is_chat) {
    one["delta"]["content"] = text;
  } else {
    one["text"] = text;
  }
  std::size_t& offset = m_offsets[static_cast<std::size_t>(choice)];
  one["logprobs"] = m_has_logprobs ? logprobs_of(tokens, m_echo.size() + offset) : OrderedJson();
  one["finish_reason"] = nullptr;
  offset += text.size();
  json["choices"].push_back(std::move(one));
  return "data: " + dump(json) + "\n\n";
}

std::string ReplyWriter::end(int choice, const Ending& ending) const {
  OrderedJson json = frame(true);
  OrderedJson one = choice_of(choice);
  if (m_is_chat) {
    one["delta"] = OrderedJson::object();
  } else {
    one["text"] = "";
  }
  one["logprobs"] = nullptr;
  one["finish_reason"] = finish_reason(ending.reason);
  one["kvzap"] = kvzap_of(ending);
  json["choices"].push_back(std::move(one));
  return "data: " + dump(json) + "\n\n";
}

std::string ReplyWriter::usage(const std::vector<Ending>& endings) const {
  OrderedJson json = frame(true);
  json["usage"] = usage_of(endings);
  if (!endings.empty()) json["kvzap"] = kvzap_of(endings.front());
  return "data: " + dump(json) + "\n\n";
}

std::string metrics_text(const SchedulerCounts& counts, const ServedModel& model) {
  std::string text;
  std::string value_of_label;
  for (const char letter : detail::shown(model.name, 200)) {
    if (letter == '"' || letter == '\\') value_of_label += '\\';
    value_of_label += letter;
  }
  const std::string labels = fmt::format("{{model_name=\"{}\"}}", value_of_label);
  const auto add = [&](const char* metric, const char* type, const char* help, double value) {
    text += fmt::format("# HELP kvzap_{0} {1}\n# TYPE kvzap_{0} {2}\nkvzap_{0}{3} {4}\n", metric,
                        help, type, labels, value);
  };
  const auto gauge = [&](const char* name, const char* help, auto value) {
    add(name, "gauge", help, static_cast<double>(value));
  };
  const auto counter = [&](const char* name, const char* help, auto value) {
    add(name, "counter", help, static_cast<double>(value));
  };
  gauge("requests_running", "Sequences in the batch.", counts.running);
  gauge("requests_waiting", "Sequences that wait.", counts.waiting);
  gauge("prefixes", "States of prompts kept for others.", counts.prefixes);
  gauge("kv_allocated_bytes", "Pages and rings of rank 0.", counts.kv_allocated);
  gauge("kv_free_bytes", "What rank 0 may still take.", counts.kv_free);
  gauge("keep_ratio", "Kept share of pairs, observed.", counts.keep_ratio);
  counter("requests_finished_total", "Requests answered.", counts.finished);
  counter("requests_cancelled_total", "Requests whose client went away.", counts.cancelled);
  counter("requests_failed_total", "Requests that ended with a server's error.", counts.failed);
  counter("requests_refused_total", "Requests that the queue had no room for.", counts.refused);
  counter("preemptions_total", "Sequences freed for others and computed anew.", counts.preempted);
  counter("prefixes_evicted_total", "States of prompts freed for memory.", counts.prefixes_evicted);
  counter("steps_total", "Steps of the model.", counts.steps);
  counter("prompt_tokens_total", "Tokens of prompts run.", counts.prompt_tokens);
  counter("cached_prompt_tokens_total", "Tokens of prompts that a kept state spared.",
          counts.cached_tokens);
  counter("generation_tokens_total", "Tokens generated.", counts.new_tokens);
  counter("step_seconds_total", "Time in steps.", counts.step_seconds);
  counter("scheduler_seconds_total", "Time of the scheduler between them.", counts.own_seconds);
  return text;
}

}  // namespace kvzap::server
