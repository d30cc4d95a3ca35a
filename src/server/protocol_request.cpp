#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <kvzap/server/protocol.hpp>
#include <limits>
#include <random>

#include "files/json_file.hpp"
#include "files/quote.hpp"
#include "server/answer_grammar.hpp"
#include "server/answer_parts.hpp"
#include "server/chat_form.hpp"
#include "server/embedding_form.hpp"
#include "server/request_fields.hpp"
#include "server/segments.hpp"
#include "server/tool_request.hpp"
#include "text/chat_input.hpp"

namespace kvzap::server {
namespace {

constexpr const char* kept_field = "return_kept";  // of "kvzap"
constexpr const char* context_exceeded = "context_length_exceeded";

}  // namespace

const Json& unsupported_fields() {
  static const Json fields = Json::parse(R"({
    "functions": [], "function_call": ["none", "auto"],
    "modalities": [["text"]], "audio": [], "prediction": [], "web_search_options": [], "suffix": [],
    "guided_whitespace_pattern": [], "grammar_lazy": [false], "grammar_triggers": [],
    "repeat_penalty": [1], "typical_p": [1], "tfs_z": [1], "mirostat": [0], "dynatemp_range": [0],
    "xtc_probability": [0], "dry_multiplier": [0], "top_n_sigma": [-1], "samplers": [],
    "use_beam_search": [false], "length_penalty": [1], "bad_words": [], "allowed_token_ids": [],
    "logits_processors": [], "prompt_logprobs": [], "truncate_prompt_tokens": [],
    "include_stop_str_in_output": [false], "skip_special_tokens": [true], "n_predict": [-1],
    "n_probs": [0], "chat_template": [], "documents": [], "lora": [], "add_generation_prompt": [true]
  })");
  return fields;
}

namespace {

/// Refuses fields for unsupported features, unless their value is empty or changes nothing.
void refuse_unsupported(const Json& body, std::int64_t choices) {
  for (const auto& [name, neutral] : unsupported_fields().items()) {
    const Json* const field = field_of(body, name.c_str());
    if (!field || (field->is_string() && field->get_ref<const std::string&>().empty()) ||
        ((field->is_array() || field->is_object()) && field->empty()) ||
        std::find(neutral.begin(), neutral.end(), *field) != neutral.end()) {
      continue;
    }
    refuse_as_unsupported(name);
  }
  if (integer_of(body, "best_of", limits::best_of, choices) != choices) {
    refuse_as_unsupported("best_of", "; expected the value of n");
  }
}

std::vector<std::string> stops_of(const Json& body) {
  const Json* const field = field_of(body, "stop");
  std::vector<std::string> stops;
  if (!field) return stops;
  if (field->is_string()) {
    stops.push_back(field->get<std::string>());
  } else if (field->is_array() && field->size() <= limits::stops) {
    for (const Json& one : *field) stops.push_back(text_of(one, "stop"));
  } else {
    refuse("stop", fmt::format("a string, or an array of at most {} strings", limits::stops),
           *field);
  }
  for (const std::string& stop : stops) {
    if (!stop.empty() && stop.size() <= limits::stop_bytes) continue;
    throw BadRequest("stop", fmt::format("stop has a string of {} bytes; expected 1 to {}",
                                         stop.size(), limits::stop_bytes));
  }
  return stops;
}

/// Reads a field of "kvzap" that says how much is evicted. Returns false for another field.
bool read_amount(const std::string& key, const Json& value, PruneWish& wish) {
  const std::string name = "kvzap." + key;
  if (key == "threshold" || key == "evict_ratio") {
    if (!value.is_number() || !std::isfinite(value.get<double>())) refuse(name, "a number", value);
    (key == "threshold" ? wish.threshold : wish.evict_ratio) = value.get<double>();
    return true;
  }
  if (key != "keep_tokens" && key != "kv_budget") return false;
  if (key == "kv_budget" && value.is_string()) {
    try {
      wish.kv_bytes = parse_bytes(value.get<std::string>(), name);
    } catch (const Error& error) {
      throw BadRequest(name, error.what());
    }
    return true;
  }
  const Json object = {{name, value}};
  (key == "kv_budget" ? wish.kv_bytes : wish.keep_tokens) =
      integer_of(object, name.c_str(), limits::keep_tokens, 0);
  return true;
}

/// Reads a field of "kvzap" about cuts while the answer is generated. Returns false for another.
bool read_cuts(const std::string& key, const Json& value, Pruning::DecodeCuts& cuts) {
  const std::string name = "kvzap." + key;
  const Json object = {{name, value}};
  if (key == "decode_every") {
    cuts.every = integer_of(object, name.c_str(), limits::keep_tokens, 0);
  } else if (key == "decode_keep") {
    cuts.keep = integer_of(object, name.c_str(), limits::keep_tokens, 0);
  } else if (key == "decode_evict_ratio") {
    if (!value.is_number() || !std::isfinite(value.get<double>())) refuse(name, "a number", value);
    cuts.evict_ratio = value.get<double>();
  } else {
    return false;
  }
  return true;
}

PruneWish wish_of(const Json& body) {
  PruneWish wish;
  const Json* const field = field_of(body, "kvzap");
  if (!field) return wish;
  if (!field->is_object()) refuse("kvzap", "an object", *field);
  std::vector<std::string> amounts;
  for (const auto& [key, value] : field->items()) {
    AskedFields::note(key.c_str());
    if (value.is_null()) continue;
    const bool is_amount = read_amount(key, value, wish);
    if (is_amount) {
      amounts.push_back(key);
    } else if (key == "policy") {
      wish.policy = text_of(value, "kvzap.policy");
    } else if (key == "prune") {
      const std::string name = text_of(value, "kvzap.prune");
      for (const PruneMode mode : {PruneMode::none, PruneMode::prefill, PruneMode::always}) {
        if (name == name_of(mode)) wish.prune = mode;
      }
      if (!wish.prune) refuse("kvzap.prune", "\"none\", \"prefill\" or \"always\"", value);
    } else if (key == "kv_type") {
      wish.kv_type = text_of(value, "kvzap.kv_type");
    } else if (!read_cuts(key, value, wish.decode) && key != kept_field) {
      throw BadRequest("kvzap",
                       fmt::format("kvzap has no field {}; expected policy, threshold, "
                                   "evict_ratio, keep_tokens, kv_budget, prune, decode_every, "
                                   "decode_keep, decode_evict_ratio, kv_type or return_kept",
                                   files::in_quotes(key)));
    }
  }
  if (amounts.size() > 1) {
    throw BadRequest(
        "kvzap", fmt::format("kvzap has {} and {}; expected one of them", amounts[0], amounts[1]));
  }
  return wish;
}

/// Call it after wish_of, which checks that "kvzap" is an object.
bool returns_kept_of(const Json& body) {
  const Json* const own = field_of(body, "kvzap");
  const Json* const field = own ? field_of(*own, kept_field) : nullptr;
  if (field && !field->is_boolean()) refuse("kvzap.return_kept", "true or false", *field);
  return field && field->get<bool>();
}

std::uint64_t random_seed() {
  std::random_device source;
  return (std::uint64_t{source()} << 32) | source();
}

SamplingOptions sampling_of(const Json& body, const ServedModel& model) {
  const SamplingOptions& standard = model.sampling;
  SamplingOptions sampling = standard;
  sampling.temperature = number_of(body, "temperature", limits::temperature, standard.temperature);
  sampling.top_p = number_of(body, "top_p", limits::share, standard.top_p);
  // Other servers take 0 and -1 for all tokens.
  sampling.top_k =
      std::max<std::int64_t>(0, integer_of(body, "top_k", limits::top_k, standard.top_k));
  sampling.min_p = number_of(body, "min_p", limits::share, standard.min_p);
  sampling.presence_penalty =
      number_of(body, "presence_penalty", limits::penalty, standard.presence_penalty);
  sampling.frequency_penalty =
      number_of(body, "frequency_penalty", limits::penalty, standard.frequency_penalty);
  sampling.repetition_penalty = number_of(body, "repetition_penalty", limits::repetition_penalty,
                                          standard.repetition_penalty);
  if (sampling.top_p == 0) sampling.top_p = std::numeric_limits<double>::min();  // the likeliest
  if (const Json* const seed = field_of(body, "seed")) {
    if (!seed->is_number_integer()) refuse("seed", "an integer", *seed);
    sampling.seed = seed->is_number_unsigned()
                        ? seed->get<std::uint64_t>()
                        : static_cast<std::uint64_t>(seed->get<std::int64_t>());
  }
  return sampling;
}

std::vector<TokenId> ids_of(const Json& list, const std::string& name, const ServedModel& model) {
  const std::int64_t most =
      model.vocabulary > 0 ? model.vocabulary - 1 : std::numeric_limits<TokenId>::max();
  std::vector<TokenId> ids;
  ids.reserve(list.size());
  for (const Json& id : list) {
    if (!id.is_number_integer() || id.get<std::int64_t>() < 0 || id.get<std::int64_t>() > most) {
      throw BadRequest(name, fmt::format("{} has {}; expected token ids from 0 to {}", name,
                                         files::described(id), most));
    }
    ids.push_back(id.get<TokenId>());
  }
  return ids;
}

/// Sets the tokens that end an answer, those that may not yet, and the biases of others.
void set_token_rules(const Json& body, const ServedModel& model, GenerationRequest& generation) {
  if (!bool_of(body, "ignore_eos", false)) generation.stop_ids = model.stop_ids;
  if (const Json* const ids = field_of(body, "stop_token_ids")) {
    if (!ids->is_array() || ids->size() > limits::token_rules) {
      refuse("stop_token_ids", fmt::format("an array of at most {} token ids", limits::token_rules),
             *ids);
    }
    const std::vector<TokenId> others = ids_of(*ids, "stop_token_ids", model);
    generation.stop_ids.insert(generation.stop_ids.end(), others.begin(), others.end());
  }
  SamplingOptions& sampling = generation.sampling;
  sampling.min_new_tokens = integer_of(body, "min_tokens", limits::min_tokens, 0);
  if (sampling.min_new_tokens > 0) sampling.end_tokens = generation.stop_ids;
  const Json* const biases = field_of(body, "logit_bias");
  if (!biases) return;
  if (!biases->is_object() || biases->size() > limits::token_rules) {
    refuse("logit_bias",
           fmt::format("an object with at most {} token ids and their biases", limits::token_rules),
           *biases);
  }
  for (const auto& [key, bias] : biases->items()) {
    const Json id = Json::parse(key, nullptr, false);
    const double value = bias.is_number() ? bias.get<double>() : std::nan("");
    if (!(value >= limits::bias.least && value <= limits::bias.most)) {
      refuse("logit_bias",
             fmt::format("biases from {} to {}", limits::bias.least, limits::bias.most), bias);
    }
    sampling.logit_bias.emplace_back(
        ids_of(Json::array({id.is_number_integer() ? id : Json(key)}), "logit_bias", model).front(),
        static_cast<float>(value));
  }
}

/// Refuses a text that cannot fit into the context, before the tokenizer takes its time.
void check_bytes(std::size_t bytes, const std::string& name, const ServedModel& model) {
  if (model.max_tokens <= 0 || model.longest_token == 0) return;
  const double most =
      static_cast<double>(model.max_tokens) * static_cast<double>(model.longest_token);
  if (static_cast<double>(bytes) <= most) return;
  throw BadRequest(
      name,
      fmt::format("{} has {} bytes; expected at most {:.0f}: the context has {} tokens "
                  "of up to {} bytes",
                  name, bytes, most, model.max_tokens, model.longest_token),
      context_exceeded);
}

void check_tokens(std::int64_t count, const std::string& what, const std::string& name,
                  const ServedModel& model) {
  if (count == 0) throw BadRequest(name, what + " has no tokens");
  if (model.max_tokens <= 0 || count <= model.max_tokens) return;
  throw BadRequest(name,
                   fmt::format("{} has {} tokens; expected at most {}, the length of the context",
                               what, count, model.max_tokens),
                   context_exceeded);
}

/// Whether a prompt is an array of token ids, rather than an array of prompts.
bool has_ids(const Json& prompt) {
  return prompt.is_array() && !prompt.empty() && prompt.front().is_number();
}

/// Reads one prompt: a text or token ids. Adds its text to `texts`.
Prompt prompt_of(const Json& prompt, const std::string& name, const ServedModel& model,
                 std::vector<std::string>& texts) {
  if (!prompt.is_string() && !has_ids(prompt)) {
    refuse(name, "a string or an array of token ids", prompt);
  }
  std::vector<TokenId> ids;
  std::string& text = texts.emplace_back();
  if (prompt.is_string()) {
    if (!model.tokenizer) throw BadRequest(name, "the model has no tokenizer; expected token ids");
    text = prompt.get<std::string>();
    check_bytes(text.size(), name, model);
    ids = model.tokenizer->encode(text, true);
  } else {
    ids = ids_of(prompt, name, model);
    if (model.tokenizer) text = model.tokenizer->decode(ids);
  }
  // The first prompt that is too long spares the tokenizer the others.
  check_tokens(static_cast<std::int64_t>(ids.size()), name == "prompt" ? "the prompt" : name, name,
               model);
  return {{Segment::Kind::context, std::move(ids), {}, true}};
}

}  // namespace

std::vector<Prompt> prompts_of(const Json& body, const char* field, std::int64_t most,
                               const ServedModel& model, std::vector<std::string>& texts) {
  const Json* const found = member_of(body, field);
  if (!found) throw BadRequest(field, fmt::format("the {} is missing", field));
  if (found->is_string() || has_ids(*found)) return {prompt_of(*found, field, model, texts)};
  if (!found->is_array() || found->empty()) {
    refuse(field, "a string, an array of token ids, or an array of these", *found);
  }
  if (static_cast<std::int64_t>(found->size()) > most) {
    throw BadRequest(field, fmt::format("{} is an array of {} prompts; expected at most {}", field,
                                        found->size(), most));
  }
  const auto name = [&](std::size_t i) { return fmt::format("{}[{}]", field, i); };
  for (std::size_t i = 0; i < found->size(); ++i) {
    const Json& one = (*found)[i];
    if (one.is_string()) check_bytes(one.get_ref<const std::string&>().size(), name(i), model);
  }
  std::vector<Prompt> prompts;
  for (std::size_t i = 0; i < found->size(); ++i) {
    prompts.push_back(prompt_of((*found)[i], name(i), model, texts));
  }
  return prompts;
}

namespace {

const Tokenizer& tokenizer_of(const ServedModel& model) {
  if (!model.tokenizer) throw BadRequest("", "the model has no tokenizer");
  return *model.tokenizer;
}

/// Runs work of the chat template, which may refuse the messages.
template <class Work>
auto by_template(const Work& work) {
  try {
    return work();
  } catch (const BadRequest&) {
    throw;
  } catch (const Error& error) {
    throw BadRequest("messages", error.what());
  }
}

Prompt prompt_without_tools(const Json& json, bool thinking, const ServedModel& model) {
  const Messages read = messages_of(json);
  std::vector<ChatMessage> messages;
  std::size_t bytes = 0;
  for (const Json& message : read.list) {
    const Json& role = message.at("role");
    messages.push_back({role == "system"      ? ChatRole::system
                        : role == "assistant" ? ChatRole::assistant
                                              : ChatRole::user,
                        message.at("content").get<std::string>()});
    bytes += messages.back().content.size();
  }
  // The model continues a last message of the assistant.
  const bool continues = messages.size() > 1 && messages.back().role == ChatRole::assistant;
  if (messages[messages.size() - (continues ? 2 : 1)].role != ChatRole::user) {
    throw BadRequest("messages",
                     "the last message is not a user message, alone or with the beginning of its "
                     "answer by the assistant after it");
  }
  check_bytes(bytes, "messages", model);
  return by_template([&] { return segments_of(messages, read.parts, thinking, model); });
}

/// Sets the tools of `format`.
Prompt prompt_with_tools(const Json& json, bool thinking, const ServedModel& model,
                         AnswerFormat& format) {
  text::ChatInput input;
  const Json tools = tools_of(json);
  if (!tools.empty()) input.tools = tools;
  input.messages = messages_of(json).list;
  const Json& last = input.messages.back().at("role");
  if (last != "user" && last != "tool") {
    throw BadRequest("messages", "the last message is neither of the user nor of a tool");
  }
  check_bytes(files::json_text(input.messages).size(), "messages", model);
  if (!model.chat_template || !model.tokenizer) {
    throw BadRequest("tools", "the model has no known chat template");
  }
  if (!input.tools.is_null()) {
    check_bytes(files::json_text(input.tools).size(), "tools", model);
    if (model.chat_template->source(true).find("tools") == std::string_view::npos) {
      throw BadRequest("tools", "tools are not supported by the model's chat template");
    }
    format.tools = input.tools;
  }
  input.thinking = thinking;
  const std::string text = by_template([&] { return model.chat_template->render(input); });
  return {{Segment::Kind::context, model.tokenizer->encode(text), {}, true}};
}

/// Whether a prompt ends with the mark of thoughts.
bool begins_thoughts(const Prompt& prompt, const Tokenizer& tokenizer) {
  constexpr std::size_t looked_at = 8;
  const std::vector<TokenId>& ids = prompt.back().tokens;
  const std::string end = tokenizer.decode(
      std::vector<TokenId>(ids.end() - static_cast<std::ptrdiff_t>(std::min(looked_at, ids.size())),
                           ids.end()),
      false);
  constexpr std::string_view mark = "<think>";
  const std::size_t last = end.find_last_not_of(" \t\n\r");
  return last != std::string::npos && last + 1 >= mark.size() &&
         end.compare(last + 1 - mark.size(), mark.size(), mark) == 0;
}

void set_grammar(AnswerGrammar answers, ApiRequest& request, GenerationRequest& generation) {
  generation.sampling.grammar = std::move(answers.grammar);
  request.make_grammar = std::move(answers.make);
}

/// Reads the fields of a chat. Sets the number of log probabilities in `generation`.
Prompt read_chat(const Json& json, const ServedModel& model, ApiRequest& request,
                 GenerationRequest& generation) {
  request.has_logprobs = bool_of(json, "logprobs", false);
  const std::int64_t top = integer_of(json, "top_logprobs", limits::logprobs, 0);
  if (request.has_logprobs) {
    generation.top_logprobs = static_cast<int>(top);
  } else if (top > 0) {
    throw BadRequest("top_logprobs", "top_logprobs needs logprobs to be true");
  }
  bool thinking = model.thinking;
  if (const Json* const wish = field_of(json, "chat_template_kwargs")) {
    if (!wish->is_object()) refuse("chat_template_kwargs", "an object", *wish);
    thinking = bool_of(*wish, "enable_thinking", thinking);
  }
  const bool has_tools = uses_tools(json);
  AnswerFormat format;
  if (model.chat_template) format = format_of(model.chat_template->source(has_tools));
  format.calls_once = !bool_of(json, "parallel_tool_calls", true);
  const Prompt prompt = has_tools ? prompt_with_tools(json, thinking, model, format)
                                  : prompt_without_tools(json, thinking, model);
  format.begins_in_thoughts = format.has_thoughts && begins_thoughts(prompt, *model.tokenizer);
  set_grammar(answer_grammar(json, format, model), request, generation);
  if (format.has_thoughts || format.needs_special_tokens()) {
    request.format = std::make_shared<const AnswerFormat>(std::move(format));
  }
  return prompt;
}

/// Reads the fields of a completion, as read_chat does.
std::vector<Prompt> read_completion(const Json& json, const ServedModel& model, ApiRequest& request,
                                    GenerationRequest& generation) {
  if (field_of(json, "logprobs")) {
    request.has_logprobs = true;
    generation.top_logprobs = static_cast<int>(integer_of(json, "logprobs", limits::logprobs, 0));
  }
  request.echoes = bool_of(json, "echo", false);
  generation.prompt_logprobs = request.echoes && request.has_logprobs;
  set_grammar(answer_grammar(json, {}, model), request, generation);
  return prompts_of(json, "prompt", model.max_prompts, model, request.prompt_texts);
}

/// Sets the length of each answer. Throws BadRequest for a prompt without tokens and for one that
/// is too long.
void set_lengths(const Json& json, const ServedModel& model, ApiRequest& request) {
  limits::Range<std::int64_t> range = limits::max_tokens;
  if (!request.is_chat()) range.least = 0;
  const std::int64_t most = range.most, standard = request.is_chat() ? most : 16;
  const auto length_of = [&](const char* name, std::int64_t otherwise) {
    return is_minus_one(field_of(json, name)) ? most : integer_of(json, name, range, otherwise);
  };
  const std::int64_t wanted = length_of("max_completion_tokens", length_of("max_tokens", standard));
  for (std::size_t i = 0; i < request.generations.size(); ++i) {
    GenerationRequest& generation = request.generations[i];
    const std::string name = request.is_chat()      ? "messages"
                             : request.prompts == 1 ? "prompt"
                                                    : fmt::format("prompt[{}]", i);
    const std::string what = request.prompts == 1 ? "the prompt" : name;
    const std::int64_t count = tokens_of(generation.prompt);
    check_tokens(count, what, name, model);
    request.prompt_tokens += count;
    const std::int64_t room = model.max_tokens > 0 ? model.max_tokens - count + 1 : most;
    generation.max_new_tokens = std::min(room, wanted);
  }
}

/// Reads the fields of a chat or a completion.
ApiRequest read_fields(const Json& json, Endpoint endpoint, const ServedModel& model) {
  ApiRequest request;
  request.endpoint = endpoint;
  GenerationRequest generation;  // for each prompt
  generation.choices = static_cast<int>(integer_of(json, "n", {1, model.max_choices}, 1));
  refuse_unsupported(json, generation.choices);
  generation.sampling = sampling_of(json, model);
  const PruneWish wish = wish_of(json);
  generation.returns_kept = returns_kept_of(json);
  generation.pruning = model.pruning_of(wish);
  generation.page_format = model.page_format_of(wish);
  request.stop = stops_of(json);
  if (!request.stop.empty() && !model.tokenizer) {
    throw BadRequest("stop", "stop needs a model with a tokenizer");
  }
  set_token_rules(json, model, generation);
  request.streams = bool_of(json, "stream", false);
  request.reports_progress = bool_of(json, "return_progress", false) && request.streams;
  if (const Json* const options = field_of(json, "stream_options")) {
    if (!options->is_object()) refuse("stream_options", "an object", *options);
    request.includes_usage = bool_of(*options, "include_usage", false);
  }
  std::vector<Prompt> prompts;
  if (request.is_chat()) {
    prompts.push_back(read_chat(json, model, request, generation));
  } else {
    prompts = read_completion(json, model, request, generation);
  }
  request.prompts = static_cast<int>(prompts.size());
  request.choices = generation.choices;
  const Json* const seed = field_of(json, "seed");
  const bool has_seed = seed ? !is_minus_one(seed) : model.has_seed;
  for (Prompt& prompt : prompts) {
    if (!has_seed) generation.sampling.seed = random_seed();
    generation.prompt = std::move(prompt);
    request.generations.push_back(generation);
  }
  set_lengths(json, model, request);
  return request;
}

}  // namespace

std::size_t longest_token(const Tokenizer& tokenizer) {
  std::size_t longest = 0;
  for (std::size_t id = 0; id < tokenizer.vocabulary_size(); ++id) {
    longest = std::max(longest, tokenizer.token_bytes(static_cast<TokenId>(id)).size());
  }
  return longest;
}

std::shared_ptr<AnswerGrammars> answer_grammars(const Tokenizer& tokenizer, std::int64_t vocabulary,
                                                const std::vector<TokenId>& end_ids) {
  return std::make_shared<AnswerGrammars>([tokenizer, vocabulary, end_ids] {
    return TokenGrammar::vocabulary_of(tokenizer, vocabulary, end_ids);
  });
}

ApiRequest parse_request(std::string_view body, Endpoint endpoint, const ServedModel& model) {
  files::ParsedJson parsed = object_of(body);
  check_model(parsed.value(), model);
  if (embeds(endpoint)) return embedding_request(parsed.value(), endpoint, model);
  if (endpoint == Endpoint::chat || endpoint == Endpoint::completions) {
    return read_fields(parsed.value(), endpoint, model);
  }
  ChatForm form = endpoint == Endpoint::messages ? chat_of_messages(parsed.take())
                                                 : chat_of_response(parsed.take(), model);
  try {
    ApiRequest request = read_fields(form.body.value(), endpoint, model);
    request.response = std::move(form.response);
    if (request.make_grammar) {
      request.make_grammar = [make = std::move(request.make_grammar), names = form.names] {
        try {
          return make();
        } catch (const BadRequest& error) {
          throw renamed(error, names);
        }
      };
    }
    return request;
  } catch (const BadRequest& error) {
    throw renamed(error, form.names);
  }
}

void complete(ApiRequest& request) {
  if (!request.make_grammar) return;
  const auto grammar = request.make_grammar();
  for (auto& generation : request.generations) generation.sampling.grammar = grammar;
  request.make_grammar = nullptr;
}

std::string count_tokens(std::string_view body, const ServedModel& model) {
  const ApiRequest request = parse_request(body, Endpoint::messages, model);
  return files::json_text({{"input_tokens", request.prompt_tokens}});
}

std::string tokenize(std::string_view body, const ServedModel& model) {
  const files::ParsedJson parsed = object_of(body);
  const Json& json = parsed.value();
  check_model(json, model);
  const Json* const content = member_of(json, "content");
  if (!content) throw BadRequest("content", "content is missing");
  const std::string text = text_of(*content, "content");
  check_bytes(text.size(), "content", model);
  Json reply;
  reply["tokens"] = tokenizer_of(model).encode(text, bool_of(json, "add_special", false));
  return files::json_text(reply);
}

std::string detokenize(std::string_view body, const ServedModel& model) {
  const files::ParsedJson parsed = object_of(body);
  const Json& json = parsed.value();
  check_model(json, model);
  const Json* const tokens = member_of(json, "tokens");
  if (!tokens) throw BadRequest("tokens", "tokens are missing");
  if (!tokens->is_array()) refuse("tokens", "an array of token ids", *tokens);
  const std::vector<TokenId> ids = ids_of(*tokens, "tokens", model);
  Json reply;
  try {
    reply["content"] = tokenizer_of(model).decode(ids, false);
  } catch (const BadRequest&) {
    throw;
  } catch (const Error& error) {
    throw BadRequest("tokens", error.what());
  }
  return files::json_text(reply);
}

}  // namespace kvzap::server
