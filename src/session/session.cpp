#include <fmt/format.h>

#include <exception>
#include <kvzap/config.hpp>
#include <kvzap/core/threads.hpp>
#include <kvzap/engine/learn_from_texts.hpp>
#include <kvzap/engine/session.hpp>
#include <kvzap/engine/thresholds.hpp>
#include <kvzap/model/tokenizer.hpp>
#include <utility>

#include "files/counted.hpp"
#include "files/plain_text.hpp"
#include "model/find_model.hpp"
#include "model/model_folder.hpp"
#include "parallel/message.hpp"
#include "session/model_files.hpp"
#include "session/model_setup.hpp"
#include "session/prompt.hpp"

namespace kvzap {
namespace {

namespace fs = std::filesystem;

constexpr const char* pruning_attribute = "session_pruning";
constexpr const char* surrogate_hash_attribute = "session_surrogate_hash";
constexpr const char* template_attribute = "session_chat_template";
constexpr const char* thinking_attribute = "session_thinking";
constexpr const char* system_attribute = "session_system";

/// Ends an answer on all ranks.
struct Stopped {};

template <class T>
T attribute(const SnapshotInfo& info, const char* name) {
  const auto found = info.further.find(name);
  if (found == info.further.end() || !std::holds_alternative<T>(found->second)) {
    throw Error(fmt::format("no attribute {}; expected a file of Session::save", name));
  }
  return std::get<T>(found->second);
}

std::string surrogate_hash(const std::string& folder) {
  return folder.empty() ? "" : session::hash_of_policy_file(folder);
}

void check_hash(const std::string& what, const std::string& found, const std::string& expected) {
  if (found == expected) return;
  throw Error(fmt::format("another {}: its hash is {}; expected {}", what, found, expected));
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
  void check_tokens(std::int64_t tokens) const {
    if (tokens <= limit) return;
    throw Error(fmt::format("the prompt has {}; the longest context accepted is {}",
                            files::counted(tokens, "token"), limit));
  }

  Communicator comm;
  Pruning pruning;
  SessionOptions options;
  std::optional<PolicySpec> spec;  // of the pruning, if it prunes
  std::optional<session::ModelSetup> setup;
  std::optional<GenerationConfig> rules;
  std::optional<Tokenizer> tokenizer;         // on rank 0
  std::optional<ChatTemplate> chat_template;  // on rank 0
  session::PromptForm form;                   // on rank 0
  std::int64_t limit = 0;
  std::function<std::unique_ptr<Generator>()> make_generator;
};

struct Session::Impl {
  explicit Impl(std::shared_ptr<const Shared> with)
      : shared(std::move(with)), comm(shared->comm), generator(shared->generator()) {}

  void read(std::vector<TokenId> ids);
  std::string ask(const std::string& question, const AskOptions& ask_options);
  std::string generate(const std::vector<TokenId>& ids, const AskOptions& ask_options,
                       bool streams);
  SnapshotInfo info() const;

  bool has_context() const { return !generator->context().empty(); }

  std::shared_ptr<const Shared> shared;
  Communicator comm;
  std::unique_ptr<Generator> generator;
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
    if (options.policy) {
      pruning.policy = options.policy->name;
      spec = PolicySpec{pruning.policy, options.policy.get(), {}, {}};
    } else {
      spec = policy_spec(pruning);
    }
    if (!pruning.prunes()) spec.reset();
    if (options.threads < 0) {
      throw Error(fmt::format("threads is {}; expected 0 or more", options.threads));
    }
    ModelConfig config = ModelConfig::load(folder);
    const std::int64_t layers = config.num_hidden_layers;
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
  const Tokenizer* const encoder = tokenizer ? &*tokenizer : nullptr;
  const auto repeat = session::share_repeat_prompt(spec, *setup, source, encoder, {}, comm);
  CacheOptions cache;
  comm.agree([&] {
    static_cast<LoadedPruning&>(cache) =
        session::load_policy(pruning, spec, *setup, options.dtype, comm, repeat);
    cache.page_format = options.page_format;
    cache.pruning.window = session::ring_rows(pruning.window, setup->config.longest_context());
  });
  const auto& choice = cache.policy;
  const auto texts = session::read_policy_texts(choice.get(), *setup, encoder, comm);
  const auto model = session::load_model(*setup, options.dtype, std::nullopt, options.weights, comm,
                                         options.progress);
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
  answered.clear();
  stop_reason.reset();
  if (!has_context()) {
    comm.agree([&] {
      if (const auto& choice = generator->engine().options().policy) {
        check_budget(choice->budget, shared->setup->config, shared->options.dtype,
                     static_cast<std::int64_t>(ids.size()), shared->options.page_format);
      }
    });
    generator->prefill(ids, /*reusable*/ true, shared->options.progress);
    return;
  }
  comm.agree([&] { generator->append_context(ids); });
  generator->prefill_rest(shared->options.progress);
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
  return generate(ids, agreed, streams);
}

std::string Session::Impl::generate(const std::vector<TokenId>& ids, const AskOptions& ask_options,
                                    bool streams) {
  std::string text;
  std::optional<Tokenizer::StreamDecoder> decoder;
  if (shared->tokenizer) decoder.emplace(*shared->tokenizer);
  std::exception_ptr failure;
  /// Passes text to the caller. Returns whether the caller wants the answer to stop.
  const auto emit = [&](const std::string& piece) {
    text += piece;
    if (!streams || piece.empty()) return false;
    try {
      return !ask_options.on_text(piece);
    } catch (...) {
      failure = std::current_exception();
      return true;
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
  answer_options.on_token = [&](TokenId token) {
    const bool stops = decoder && emit(decoder->append(token));
    if (streams && comm.all_reduce_max(std::int64_t{stops ? 1 : 0}) != 0) throw Stopped();
  };
  bool was_stopped = false;
  stop_reason.reset();
  try {
    stop_reason = generator->answer(ids, answer_options).stop_reason;
  } catch (const Stopped&) {
    was_stopped = true;
  }
  answered = generator->answered();
  if (decoder && !was_stopped) emit(decoder->finish());
  comm.agree_on_root([&] {
    if (failure) std::rethrow_exception(failure);
  });
  return text;
}

SnapshotInfo Session::Impl::info() const {
  SnapshotInfo info;
  info.kvzap_version = KVZAP_VERSION;
  const session::ModelHashes hashes = session::hashes_of_model(shared->setup->folder, true);
  info.model = shared->setup->folder;
  info.model_hash = hashes.model;
  info.tokenizer_hash = hashes.tokenizer;
  const Pruning recorded = shared->recorded_pruning();
  info.further[pruning_attribute] = recorded.text();
  info.further[surrogate_hash_attribute] = surrogate_hash(recorded.surrogate);
  info.further[template_attribute] = std::int64_t{shared->options.chat_template ? 1 : 0};
  info.further[thinking_attribute] = std::int64_t{shared->options.thinking ? 1 : 0};
  if (shared->options.system) info.further[system_attribute] = *shared->options.system;
  return info;
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
  SnapshotInfo info;
  m_impl->comm.agree([&] {
    if (!m_impl->has_context()) throw Error("there is no context to save: read one first");
  });
  m_impl->comm.agree_on_root([&] { info = m_impl->info(); });
  m_impl->generator->write_snapshot(file, std::move(info), {});
}

namespace {

/// What a file of Session::save says about the session that wrote it.
struct Recorded {
  Pruning pruning;
  SessionOptions options;
  fs::path model;
};

/// Reads it, with other options as given, and checks that the files have not changed. `model`: the
/// model's present folder; empty: the recorded one.
Recorded recorded(const SnapshotReader& reader, const fs::path& file, const fs::path& model,
                  const SessionOptions& options) {
  const SnapshotInfo& info = reader.header().info;
  Recorded result{Pruning::none(), options, model.empty() ? fs::path(info.model) : model};
  try {
    result.pruning = Pruning::parse(attribute<std::string>(info, pruning_attribute));
    result.options.chat_template = attribute<std::int64_t>(info, template_attribute) != 0;
    result.options.thinking = attribute<std::int64_t>(info, thinking_attribute) != 0;
    result.options.system.reset();
    if (info.further.count(system_attribute) > 0) {
      result.options.system = attribute<std::string>(info, system_attribute);
    }
    result.options.dtype = reader.header().dtype;
    const session::ModelHashes hashes = session::hashes_of_model(result.model, true);
    check_hash("model", hashes.model, info.model_hash);
    check_hash("tokenizer", hashes.tokenizer, info.tokenizer_hash);
    check_hash("surrogate", surrogate_hash(result.pruning.surrogate),
               attribute<std::string>(info, surrogate_hash_attribute));
  } catch (const std::exception& error) {
    throw Error(fmt::format("snapshot {}: {}", file.string(), error.what()));
  }
  return result;
}

}  // namespace

void Session::load(const fs::path& file) {
  std::optional<SnapshotReader> reader;
  const Shared& shared = *m_impl->shared;
  m_impl->comm.agree([&] {
    reader.emplace(file);
    const Recorded found = recorded(*reader, file, shared.setup->folder, shared.options);
    const auto require = [&](const char* what, const std::string& is, const std::string& wanted) {
      if (is == wanted) return;
      throw Error(
          fmt::format("snapshot {}: {}: expected {}, found {}", file.string(), what, wanted, is));
    };
    require("pruning", found.pruning.text(), shared.recorded_pruning().text());
    require("dtype", std::string(name_of(found.options.dtype)),
            std::string(name_of(shared.options.dtype)));
    const auto form = [](const SessionOptions& options) {
      return !options.chat_template
                 ? std::string("no chat template")
                 : fmt::format("a chat template, {} thinking, system message {}",
                               options.thinking ? "with" : "without",
                               options.system ? '"' + *options.system + '"' : "of the template");
    };
    require("prompt", form(found.options), form(shared.options));
  });
  m_impl->generator->resume(*reader, /*reusable*/ true);
  m_impl->answered.clear();
  m_impl->stop_reason.reset();
}

Session Session::resume(const fs::path& file, const Communicator& communicator,
                        SessionOptions options, const fs::path& folder) {
  std::optional<SnapshotReader> reader;
  Recorded found;
  communicator.agree([&] {
    reader.emplace(file);
    found = recorded(*reader, file, folder, options);
  });
  auto impl = std::make_unique<Impl>(
      std::make_shared<Shared>(found.model, found.pruning, communicator, found.options));
  impl->generator->resume(*reader, /*reusable*/ true);
  return Session(std::move(impl));
}

}  // namespace kvzap
