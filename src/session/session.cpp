#include <fmt/format.h>

#include <exception>
#include <kvzap/config.hpp>
#include <kvzap/core/threads.hpp>
#include <kvzap/engine/learn_from_texts.hpp>
#include <kvzap/engine/session.hpp>
#include <kvzap/engine/thresholds.hpp>
#include <kvzap/model/tokenizer.hpp>
#include <limits>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "files/counted.hpp"
#include "files/json_file.hpp"
#include "files/plain_text.hpp"
#include "model/find_model.hpp"
#include "model/model_folder.hpp"
#include "parallel/message.hpp"
#include "session/conversation.hpp"
#include "session/model_files.hpp"
#include "session/model_setup.hpp"
#include "session/prompt.hpp"
#include "session/recorded.hpp"

namespace kvzap {
namespace {

namespace fs = std::filesystem;

/// Returns the parts of a pruning that do not belong to its policy, in one form.
std::string settings_of(Pruning pruning) {
  pruning.mode = pruning.mode_in_force();
  pruning.policy = {};
  pruning.surrogate.clear();
  pruning.layerwise = false;
  return pruning.text();
}

/// Returns the chat template of a snapshot's prompt, for comparisons.
std::string form_of(bool chat_template, bool thinking, const std::optional<std::string>& system) {
  if (!chat_template) return "no chat template";
  return fmt::format("a chat template, {} thinking, system message {}",
                     thinking ? "with" : "without",
                     system ? '"' + *system + '"' : "of the template");
}

/// Describes what a model is loaded with, for comparisons.
std::string weights_of(const SessionOptions& options) {
  std::string text = std::string(name_of(options.weights));
  if (options.layers) text += fmt::format(", {} layers", *options.layers);
  if (options.random_weights) text += fmt::format(", random from {}", *options.random_weights);
  if (!options.rope_scaling.empty()) {
    text += fmt::format(", RoPE scaling {} {}", options.rope_scaling, options.rope_scale);
  }
  return text;
}

/// Returns the pruning of a snapshot, and takes the options that determine its rows and its prompt.
/// Throws Error that names the file.
Pruning take_recorded(const session::Recorded& recorded, SessionOptions& options) try {
  options.dtype = dtype_from_name(recorded.text("dtype"));
  const std::string weights = recorded.text("weights");
  options.weights = weights.empty() ? WeightStorage::as_stored : weight_storage_from_name(weights);
  options.chat_template = recorded.text("raw") != "true" && recorded.text("token-ids") != "true";
  options.thinking = recorded.text("thinking") == "on";
  options.system = recorded.state.system;
  options.rope_scaling = recorded.text("rope-scaling");
  options.rope_scale = recorded.real("rope-scale").value_or(1);
  options.layers = recorded.whole("layers");
  options.random_weights = recorded.whole("random-weights");
  return recorded.pruning();
} catch (const std::exception& error) {
  throw Error(fmt::format("snapshot {}: {}", recorded.reader.file().string(), error.what()));
}

}  // namespace

std::string SessionReport::text() const {
  std::string line = fmt::format("{} of context, {:.1f} % evicted, {} of {} bytes live",
                                 files::counted(context_tokens, "token"), 100 * cache.evict_ratio(),
                                 cache.live_bytes, cache.full_bytes);
  if (is_cut()) {
    line += fmt::format(", answer cut after {} ({})", files::counted(answer_tokens, "token"),
                        name_of(*stop_reason));
  }
  return line;
}

/// What the sessions of one model share.
struct Session::Shared {
  Shared(const fs::path& folder, Pruning wanted, const Communicator& communicator,
         SessionOptions with)
      : comm(communicator), pruning(std::move(wanted)), options(std::move(with)) {
    set_up(folder);
    load();
  }

  void set_up(const fs::path& given);
  void load();
  std::unique_ptr<Generator> generator() const {
    std::unique_ptr<Generator> made;
    comm.agree([&] { made = make_generator(); });
    return made;
  }
  /// The pruning that files name.
  Pruning recorded_pruning() const { return pruning.prunes() ? pruning : Pruning::none(); }
  /// Its policy, as ConversationState::policy.
  std::string identity() const {
    return options.policy ? options.policy->name : session::identity_of_policy(recorded_pruning());
  }
  nlohmann::ordered_json recorded_options() const;
  const Tokenizer* encoder() const { return tokenizer ? &*tokenizer : nullptr; }
  /// A conversation before its first question.
  session::ConversationState begin() const {
    session::ConversationState state;
    state.dtype = options.dtype;
    state.system = options.system;
    return state;
  }
  void check_tokens(std::int64_t tokens) const {
    if (tokens <= limit) return;
    throw Error(fmt::format("the prompt has {}; the longest context accepted is {}",
                            files::counted(tokens, "token"), limit));
  }

  Communicator comm;
  Pruning pruning;
  SessionOptions options;
  std::optional<session::ModelSetup> setup;
  std::optional<GenerationConfig> rules;
  std::optional<Tokenizer> tokenizer;  // on rank 0
  /// Of grammars, made for the first one.
  mutable std::shared_ptr<const TokenGrammar::Vocabulary> vocabulary;
  std::optional<ChatTemplate> chat_template;  // on rank 0
  session::PromptForm form;                   // on rank 0
  std::int64_t limit = 0;
  std::function<std::unique_ptr<Generator>()> make_generator;
};

struct Session::Impl {
  explicit Impl(std::shared_ptr<const Shared> with)
      : shared(std::move(with)),
        comm(shared->comm),
        generator(shared->generator()),
        conversation(*generator, {shared->encoder()}, shared->begin()) {}

  void read(std::vector<TokenId> ids);
  std::string ask(const std::string& question, const AskOptions& ask_options);
  std::string generate(const AskOptions& ask_options, bool streams);
  void describe();
  void forget_answer();
  void note_context();
  void take_snapshot(const session::Recorded& recorded);

  bool has_context() const { return !generator->context().empty(); }
  bool is_pruned_with_question() const { return shared->pruning.moment == PruneMoment::question; }

  std::shared_ptr<const Shared> shared;
  Communicator comm;
  std::unique_ptr<Generator> generator;
  /// Its context's cache is that before the last answer, with PruneMoment::question.
  session::Conversation conversation;
  std::vector<TokenId> answered;
  std::optional<StopReason> stop_reason;  // of the last answer, if it has ended by itself
};

void Session::Shared::set_up(const fs::path& given) {
  fs::path folder;
  comm.agree([&] {
    const fs::path found = model::find_model(given.string());
    model::check_model(found);  // names what was given
    // Later calls may run in another directory.
    folder = fs::absolute(found);
    if (!pruning.surrogate.empty()) {
      pruning.surrogate = model::find_model(pruning.surrogate);
      if (fs::exists(pruning.surrogate)) {
        pruning.surrogate = fs::absolute(pruning.surrogate).string();
      }
    }
    if (options.policy) pruning.policy = PolicyText(options.policy);
    check(pruning);
    if (options.threads < 0) {
      throw Error(fmt::format("threads is {}; expected 0 or more", options.threads));
    }
    ModelConfig config = ModelConfig::load(folder);
    const bool scales = !options.rope_scaling.empty() && options.rope_scaling != "none";
    if (!scales && options.rope_scale != 1) throw Error("rope_scale needs rope_scaling");
    session::scale_rope(config, options.rope_scaling, options.rope_scale);
    const std::int64_t layers = options.layers.value_or(config.num_hidden_layers);
    if (layers < 1 || layers > config.num_hidden_layers) {
      throw Error(fmt::format("layers is {}; expected 1 to {}", layers, config.num_hidden_layers));
    }
    setup = session::deal_model(folder.string(), std::move(config), layers, {}, comm.size());
    const std::int64_t longest = setup->config.longest_context();
    limit = options.max_context == 0 ? longest : options.max_context;
    if (limit < 1 || limit > longest) {
      throw Error(fmt::format("max_context is {}; expected 1 to {}, or 0", limit, longest));
    }
    rules = GenerationConfig::load(folder, setup->config.vocab_size);
    options.sampling = session::with_rules(options.sampling, *rules);
    check(options.sampling);
  });
  comm.agree_on_root([&] {
    tokenizer = Tokenizer::load(folder);
    if (!options.chat_template) return;
    if (options.lookup < 0 || options.lookup > PromptLookup::most_tokens) {
      throw Error(
          fmt::format("lookup is {}; expected 0 to {}", options.lookup, PromptLookup::most_tokens));
    }
    if (options.system) files::require_utf8(*options.system, "system");
    chat_template = ChatTemplate::detect(folder);
    form = session::PromptForm::of_template(*chat_template, options.thinking, options.system);
    form.separator = options.separator;
  });
  const int threads = options.threads > 0 ? options.threads : threads_of_rank(comm);
  set_threads(threads);
  resolve_threshold(pruning, comm, options.chat_template);
}

void Session::Shared::load() {
  const auto source =
      options.chat_template ? session::PromptSource::chat_template : session::PromptSource::text;
  const auto repeat = session::share_repeat_prompt(pruning, *setup, source, encoder(), {}, comm);
  CacheOptions cache;
  comm.agree([&] {
    static_cast<LoadedPruning&>(cache) =
        session::load_policy(pruning, *setup, options.dtype, comm, repeat);
    cache.page_format = options.page_format;
    cache.read_pages = options.read_pages;
    cache.pruning.window = session::ring_rows(
        pruning.window, options.random_weights ? std::numeric_limits<std::int64_t>::max()
                                               : setup->config.longest_context());
  });
  const auto& choice = cache.policy;
  const auto texts = session::read_policy_texts(choice.get(), *setup, encoder(), comm);
  const auto model = session::load_model(*setup, options.dtype, options.random_weights,
                                         options.weights, comm, options.progress);
  if (!texts.empty()) learn_from_texts(model, *choice, texts, comm);
  make_generator = [model, cache, ranks = comm] {
    return Generator::create(model, cache.scorer(), cache, ranks);
  };
}

/// Reads rank 0's ids on all ranks.
void Session::Impl::read(std::vector<TokenId> ids) {
  comm.agree_on_root([&] {
    if (ids.empty()) throw Error("there is nothing to read: no tokens");
    session::check_ids(ids, shared->setup->config, "read");
    shared->check_tokens(static_cast<std::int64_t>(generator->context().size() + ids.size()));
  });
  comm.broadcast(ids, 0);
  forget_answer();
  if (!has_context()) {
    comm.agree([&] {
      if (const auto& choice = generator->engine().options().policy) {
        check_budget(choice->budget, shared->setup->config, shared->options.dtype,
                     static_cast<std::int64_t>(ids.size()), shared->options.page_format);
      }
    });
    generator->prefill(ids, /*reusable*/ true, shared->options.progress);
  } else {
    comm.agree([&] { generator->append_context(ids); });
    generator->prefill_rest(shared->options.progress);
  }
  note_context();
}

void Session::Impl::forget_answer() {
  answered.clear();
  stop_reason.reset();
  conversation.forget_questions();
}

/// Collective.
void Session::Impl::note_context() {
  conversation.forget_context();
  if (!is_pruned_with_question()) conversation.note_context(generator->report());
}

std::string Session::Impl::ask(const std::string& question, const AskOptions& ask_options) {
  std::vector<TokenId> ids;
  comm.agree_on_root([&] {
    if (!has_context()) throw Error("there is no context to ask about: read one first");
    if (ask_options.max_new_tokens < 1) {
      throw Error(
          fmt::format("max_new_tokens is {}; expected at least 1", ask_options.max_new_tokens));
    }
    files::require_utf8(question, "question");
    const Tokenizer& encoder = *shared->tokenizer;
    ids = shared->form.question(encoder,
                                shared->form.separated(encoder, generator->context(), question));
    session::check_ids(ids, shared->setup->config, "question");
    shared->check_tokens(static_cast<std::int64_t>(generator->context().size() + ids.size()));
  });
  // Rank 0's callback and length are used.
  AskOptions agreed = ask_options;
  bool streams = ask_options.on_text != nullptr;
  parallel::broadcast(comm, 0, ids, agreed.max_new_tokens, streams);
  forget_answer();
  if (is_pruned_with_question()) conversation.forget_context();
  conversation.add_question(question, ids);
  return generate(agreed, streams);
}

std::string Session::Impl::generate(const AskOptions& ask_options, bool streams) {
  std::exception_ptr failure;
  bool stops = false;  // the caller wants the answer to stop
  std::string told;
  const auto on_text = [&](const std::string& piece) {
    if (!streams || stops) return;
    told += piece;
    try {
      stops = !ask_options.on_text(piece);
    } catch (...) {
      failure = std::current_exception();
      stops = true;
    }
  };
  AnswerOptions answer_options;
  answer_options.max_new_tokens = ask_options.max_new_tokens;
  answer_options.stop_ids = shared->rules->stop_ids;
  answer_options.max_tokens = shared->limit;
  answer_options.progress = shared->options.progress;
  answer_options.sampling = ask_options.sampling
                                ? session::with_rules(*ask_options.sampling, *shared->rules)
                                : shared->options.sampling;
  answer_options.lookup = shared->options.lookup;
  answer_options.on_token = [&](TokenId) {
    if (streams && comm.all_reduce_max(std::int64_t{stops ? 1 : 0}) != 0) {
      throw session::Stopped{1};
    }
  };
  const bool is_stopped = conversation.answer(answer_options, on_text) != 0;
  answered = generator->answered();
  comm.agree_on_root([&] {
    if (failure) std::rethrow_exception(failure);
  });
  if (is_stopped) return told;
  const session::AnsweredQuestion& last = conversation.answers().back();
  stop_reason = last.answer.stop_reason;
  return last.text;
}

nlohmann::ordered_json Session::Shared::recorded_options() const {
  Pruning recorded = recorded_pruning();
  recorded.policy = session::absolute_policy(recorded);
  nlohmann::ordered_json all = session::options_of(recorded);
  all["model"] = setup->folder;
  all["dtype"] = name_of(options.dtype);
  if (options.page_format.quantised()) {
    all["kv-type"] = name_of(options.page_format, options.dtype);
  }
  if (!options.read_pages.all()) all["read-pages"] = name_of(options.read_pages);
  all["weights"] = name_of(options.weights);
  all["thinking"] = options.thinking ? "on" : "off";
  if (!options.chat_template) all["raw"] = true;
  if (options.layers) all["layers"] = *options.layers;
  if (options.random_weights) all["random-weights"] = *options.random_weights;
  if (!options.rope_scaling.empty()) all["rope-scaling"] = options.rope_scaling;
  if (!options.rope_scaling.empty() && options.rope_scaling != "none") {
    all["rope-scale"] = options.rope_scale;
  }
  return all;
}

/// For the files of `save`. On rank 0.
void Session::Impl::describe() {
  SnapshotInfo info;
  info.kvzap_version = KVZAP_VERSION;
  info.model = shared->setup->folder;
  info.options = files::json_text(shared->recorded_options());
  const SessionOptions& options = shared->options;
  const auto hashes = session::hashes_of_model(info.model, !options.random_weights);
  conversation.describe(std::move(info), shared->identity(), hashes,
                        options.policy ? Pruning::none() : shared->recorded_pruning());
}

/// Replaces everything that has run by the snapshot.
void Session::Impl::take_snapshot(const session::Recorded& recorded) {
  session::ConversationState state = shared->begin();
  state.texts = recorded.state.texts;
  state.questions = recorded.state.questions;
  state.answers = recorded.state.answers;
  state.context = recorded.state.context;
  conversation.resume(recorded.reader, std::move(state), /*reusable*/ true);
  answered.clear();
  stop_reason.reset();
  if (!generator->is_context_done()) generator->prefill_rest(shared->options.progress);
  if (!conversation.state().context && generator->question().empty()) note_context();
}

Session::Session(const fs::path& folder, const Pruning& pruning, const Communicator& communicator,
                 const SessionOptions& options)
    : m_impl(std::make_unique<Impl>(
          std::make_shared<Shared>(folder, pruning, communicator, options))) {}
Session::Session(std::unique_ptr<Impl> impl) : m_impl(std::move(impl)) {}
Session::~Session() = default;
Session::Session(Session&&) noexcept = default;
Session& Session::operator=(Session&&) noexcept = default;

Session Session::another() const { return Session(std::make_unique<Impl>(m_impl->shared)); }

void Session::read(const std::string& text) {
  std::vector<TokenId> ids;
  m_impl->comm.agree_on_root([&] {
    const bool is_first = !m_impl->has_context();
    if (text.empty()) throw Error("there is nothing to read: the text is empty");
    files::require_utf8(text, "read");
    const Tokenizer& tokenizer = *m_impl->shared->tokenizer;
    ids = is_first ? m_impl->shared->form.context(tokenizer, text) : tokenizer.encode(text);
  });
  m_impl->read(std::move(ids));
}

void Session::read(const std::vector<ChatMessage>& messages) {
  std::vector<TokenId> ids;
  m_impl->comm.agree_on_root([&] {
    const Shared& shared = *m_impl->shared;
    if (!shared.chat_template) throw Error("messages need a chat template");
    if (m_impl->has_context()) throw Error("messages are read first, before any other context");
    if (messages.empty() || messages.back().role != ChatRole::user) {
      throw Error("the last message is not the user's; the question continues it");
    }
    for (const ChatMessage& message : messages)
      files::require_utf8(message.content, "read: message");
    const std::string text = shared.chat_template->render(messages, shared.options.thinking);
    const std::string& suffix = shared.form.parts->suffix;
    if (text.size() < suffix.size() ||
        text.compare(text.size() - suffix.size(), suffix.size(), suffix) != 0) {
      throw Error("the chat template does not end the messages as it ends one message");
    }
    ids = shared.tokenizer->encode(text.substr(0, text.size() - suffix.size()));
  });
  m_impl->read(std::move(ids));
}

void Session::read(const std::vector<TokenId>& ids) { m_impl->read(ids); }

std::string Session::ask(const std::string& question, const AskOptions& options) {
  return m_impl->ask(question, options);
}

const std::vector<TokenId>& Session::answer() const { return m_impl->answered; }

std::pair<std::vector<TokenId>, std::vector<TokenId>> Session::prompt(
    const std::string& context, const std::string& question) const {
  std::pair<std::vector<TokenId>, std::vector<TokenId>> ids;
  const Shared& shared = *m_impl->shared;
  m_impl->comm.agree_on_root([&] {
    const Tokenizer& tokenizer = *shared.tokenizer;
    files::require_utf8(context, "prompt");
    files::require_utf8(question, "question");
    ids.first = shared.form.context(tokenizer, context);
    ids.second =
        shared.form.question(tokenizer, shared.form.separated(tokenizer, ids.first, question));
    session::check_ids(ids.first, shared.setup->config, "prompt");
    session::check_ids(ids.second, shared.setup->config, "question");
    shared.check_tokens(static_cast<std::int64_t>(ids.first.size() + ids.second.size()));
  });
  parallel::broadcast(m_impl->comm, 0, ids);
  return ids;
}

std::shared_ptr<const TokenGrammar> Session::grammar(const MakeGrammar& make) {
  const Shared& shared = *m_impl->shared;
  std::shared_ptr<const TokenGrammar> made;
  shared.comm.agree_on_root([&] {
    if (!shared.vocabulary) {
      shared.vocabulary = TokenGrammar::vocabulary_of(*shared.tokenizer, config().vocab_size,
                                                      shared.rules->stop_ids);
    }
    made = make(shared.vocabulary);
  });
  return made;
}

std::vector<TokenId> Session::encode(const std::string& text) const {
  const auto& tokenizer = m_impl->shared->tokenizer;
  return tokenizer ? tokenizer->encode(text) : std::vector<TokenId>();
}

std::string Session::decode(const std::vector<TokenId>& ids) const {
  const Shared& shared = *m_impl->shared;
  session::check_ids(ids, shared.setup->config, "decode");
  return shared.tokenizer ? shared.tokenizer->decode(ids) : "";
}

const ModelConfig& Session::config() const { return m_impl->shared->setup->config; }
const Pruning& Session::pruning() const { return m_impl->shared->pruning; }
const SessionOptions& Session::options() const { return m_impl->shared->options; }
std::int64_t Session::max_context() const { return m_impl->shared->limit; }
const std::vector<TokenId>& Session::stop_ids() const { return m_impl->shared->rules->stop_ids; }
Generator& Session::generator() { return *m_impl->generator; }

SessionReport Session::report() {
  return {static_cast<std::int64_t>(m_impl->generator->context().size()),
          m_impl->generator->report(), static_cast<std::int64_t>(m_impl->answered.size()),
          m_impl->stop_reason};
}

void Session::save(const fs::path& file) {
  m_impl->comm.agree([&] {
    if (!m_impl->has_context()) throw Error("there is no context to save: read one first");
  });
  SnapshotInfo info;
  m_impl->comm.agree_on_root([&] {
    m_impl->describe();
    info = m_impl->conversation.info();
  });
  m_impl->generator->write_snapshot(file, std::move(info), {});
}

void Session::load(const fs::path& file) {
  const Shared& shared = *m_impl->shared;
  const auto recorded = session::open_recorded(file.string(), shared.comm);
  shared.comm.agree_on_root([&] {
    const auto require = [&](const char* what, const std::string& is, const std::string& wanted) {
      if (is == wanted) return;
      throw Error(
          fmt::format("snapshot {}: {}: expected {}, found {}", file.string(), what, wanted, is));
    };
    SessionOptions there;
    const Pruning pruning = take_recorded(*recorded, there);
    const Pruning ours = shared.recorded_pruning();
    const bool is_same =
        settings_of(pruning) == settings_of(ours) &&
        (recorded->is_older() ? pruning.policy.text() == ours.policy.text() &&
                                    pruning.surrogate.empty() == ours.surrogate.empty()
                              : recorded->state.policy == shared.identity());
    if (!is_same) require("pruning", pruning.text(), ours.text());
    require("dtype", std::string(name_of(there.dtype)), std::string(name_of(shared.options.dtype)));
    require("weights and layers", weights_of(there), weights_of(shared.options));
    const SessionOptions& own = shared.options;
    require("prompt", form_of(there.chat_template, there.thinking, there.system),
            form_of(own.chat_template, own.thinking, own.system));
    session::check_model_files(*recorded, shared.setup->folder, !own.random_weights);
    if (!own.policy) session::check_policy_files(*recorded, ours);
  });
  m_impl->take_snapshot(*recorded);
}

Session Session::resume(const fs::path& file, const Communicator& communicator,
                        SessionOptions options, const fs::path& folder) {
  const auto recorded = session::open_recorded(file.string(), communicator);
  Pruning pruning;
  communicator.agree([&] { pruning = take_recorded(*recorded, options); });
  const std::string model = folder.empty() ? recorded->text("model") : folder.string();
  communicator.agree_on_root([&] {
    session::check_model_files(*recorded, model::find_model(model), !options.random_weights);
    if (!options.policy) session::check_policy_files(*recorded, pruning);
  });
  auto impl =
      std::make_unique<Impl>(std::make_shared<Shared>(model, pruning, communicator, options));
  impl->take_snapshot(*recorded);
  return Session(std::move(impl));
}

}  // namespace kvzap
