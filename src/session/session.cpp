#include <fmt/format.h>

#include <exception>
#include <kvzap/core/threads.hpp>
#include <kvzap/engine/learn_from_texts.hpp>
#include <kvzap/engine/session.hpp>
#include <kvzap/engine/thresholds.hpp>
#include <kvzap/model/tokenizer.hpp>
#include <utility>

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
  return fmt::format("{} tokens of context, {:.1f} % evicted, {} of {} bytes live", context_tokens,
                     100 * cache.evict_ratio(), cache.live_bytes, cache.full_bytes);
}

struct Session::Impl {
  Impl(const fs::path& folder, Pruning wanted, const Communicator& communicator,
       SessionOptions with)
      : comm(communicator), pruning(std::move(wanted)), options(std::move(with)) {
    set_up(folder);
    with_generator();
  }

  void set_up(const fs::path& folder);
  void with_generator();
  void read(std::vector<TokenId> ids);
  std::string ask(const std::string& question, const AskOptions& ask_options);
  std::string generate(const std::vector<TokenId>& ids, const AskOptions& ask_options,
                       bool streams);
  SnapshotInfo info() const;

  bool has_context() const { return !generator->context().empty(); }
  void check_tokens(std::int64_t tokens) const {
    if (tokens <= limit) return;
    throw Error(
        fmt::format("the prompt has {} tokens; the longest context accepted is {}", tokens, limit));
  }

  Communicator comm;
  Pruning pruning;
  SessionOptions options;
  std::optional<PolicySpec> spec;  // of the pruning, if it prunes
  std::optional<session::ModelSetup> setup;
  std::optional<Tokenizer> tokenizer;         // on rank 0
  std::optional<ChatTemplate> chat_template;  // on rank 0
  session::PromptForm form;                   // on rank 0
  std::vector<TokenId> stop_ids;
  std::int64_t limit = 0;
  std::unique_ptr<Generator> generator;
  std::vector<TokenId> answered;
};

void Session::Impl::set_up(const fs::path& folder) {
  comm.agree([&] {
    spec = policy_spec(pruning);
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
    const GenerationConfig rules = GenerationConfig::load(folder, setup->config.vocab_size);
    stop_ids = rules.stop_ids;
    options.sampling = session::with_rules(options.sampling, rules);
    check(options.sampling);
  });
  comm.agree_on_root([&] {
    tokenizer = Tokenizer::load(folder);
    if (!options.chat_template) return;
    chat_template = ChatTemplate::detect(folder);
    form = session::PromptForm::of_template(*chat_template, options.thinking, options.system);
  });
  const int threads = options.threads > 0 ? options.threads : threads_of_rank(comm);
  set_threads(threads);
  resolve_threshold(pruning, comm, options.chat_template);
}

void Session::Impl::with_generator() {
  const auto source =
      options.chat_template ? session::PromptSource::chat_template : session::PromptSource::text;
  const Tokenizer* const encoder = tokenizer ? &*tokenizer : nullptr;
  const auto repeat =
      session::share_repeat_prompt(spec, setup->folder, source, encoder, {}, setup->config, comm);
  CacheOptions cache;
  comm.agree([&] {
    static_cast<LoadedPruning&>(cache) =
        session::load_policy(pruning, spec, *setup, options.dtype, comm, repeat);
    cache.pruning.window = session::ring_rows(pruning.window, setup->config.longest_context());
  });
  const auto& choice = cache.policy;
  const auto texts =
      session::read_policy_texts(choice.get(), setup->folder, encoder, setup->config, comm);
  session::with_value_type(options.dtype, [&](auto zero) {
    using Value = decltype(zero);
    const auto model =
        session::load_model<Value>(*setup, std::nullopt, WeightStorage::as_stored, comm, {});
    comm.agree([&] { generator = Generator::create<Value>(model, cache.scorer(), cache, comm); });
    if (!texts.empty()) learn_from_texts<Value>(model, *choice, texts, comm);
  });
}

/// Reads rank 0's ids on all ranks.
void Session::Impl::read(std::vector<TokenId> ids) {
  comm.agree_on_root([&] {
    if (ids.empty()) throw Error("there is nothing to read: no tokens");
    session::check_ids(ids, setup->config, "read");
    check_tokens(static_cast<std::int64_t>(generator->context().size() + ids.size()));
  });
  comm.broadcast(ids, 0);
  answered.clear();
  if (!has_context()) {
    comm.agree([&] {
      if (const auto& choice = generator->engine().options().policy) {
        check_budget(choice->budget, setup->config, options.dtype,
                     static_cast<std::int64_t>(ids.size()));
      }
    });
    generator->prefill(ids, /*reusable*/ true);
    return;
  }
  comm.agree([&] { generator->append_context(ids); });
  generator->prefill_rest();
}

std::string Session::Impl::ask(const std::string& question, const AskOptions& ask_options) {
  std::vector<TokenId> ids;
  comm.agree_on_root([&] {
    if (!has_context()) throw Error("there is no context to ask about: read one first");
    if (ask_options.max_new_tokens < 1) {
      throw Error(
          fmt::format("max_new_tokens is {}; expected at least 1", ask_options.max_new_tokens));
    }
    ids = form.question(*tokenizer, question);
    session::check_ids(ids, setup->config, "question");
    check_tokens(static_cast<std::int64_t>(generator->context().size() + ids.size()));
  });
  comm.broadcast(ids, 0);
  // Rank 0's callback and length are used.
  std::int64_t asked[] = {ask_options.max_new_tokens, ask_options.on_text ? 1 : 0};
  comm.broadcast(asked, sizeof(asked), 0);
  AskOptions agreed = ask_options;
  agreed.max_new_tokens = asked[0];
  return generate(ids, agreed, asked[1] != 0);
}

std::string Session::Impl::generate(const std::vector<TokenId>& ids, const AskOptions& ask_options,
                                    bool streams) {
  std::string text;
  std::optional<Tokenizer::StreamDecoder> decoder;
  if (tokenizer) decoder.emplace(*tokenizer);
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
  answer_options.stop_ids = stop_ids;
  answer_options.max_tokens = limit;
  answer_options.sampling = options.sampling;
  answer_options.on_token = [&](TokenId token) {
    const bool stops = decoder && emit(decoder->append(token));
    if (streams && comm.all_reduce_max(std::int64_t{stops ? 1 : 0}) != 0) throw Stopped();
  };
  bool was_stopped = false;
  try {
    generator->answer(ids, answer_options);
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
  const session::ModelHashes hashes = session::hashes_of_model(setup->folder, true);
  info.model = fs::absolute(setup->folder).string();
  info.model_hash = hashes.model;
  info.tokenizer_hash = hashes.tokenizer;
  Pruning recorded = pruning.prunes() ? pruning : Pruning::none();
  if (!recorded.surrogate.empty()) recorded.surrogate = fs::absolute(recorded.surrogate).string();
  info.further[pruning_attribute] = recorded.text();
  info.further[surrogate_hash_attribute] = surrogate_hash(recorded.surrogate);
  info.further[template_attribute] = std::int64_t{options.chat_template ? 1 : 0};
  info.further[thinking_attribute] = std::int64_t{options.thinking ? 1 : 0};
  if (options.system) info.further[system_attribute] = *options.system;
  return info;
}

Session::Session(const fs::path& folder, const Pruning& pruning, const Communicator& communicator,
                 const SessionOptions& options)
    : m_impl(std::make_unique<Impl>(folder, pruning, communicator, options)) {}
Session::Session(std::unique_ptr<Impl> impl) : m_impl(std::move(impl)) {}
Session::~Session() = default;
Session::Session(Session&&) noexcept = default;
Session& Session::operator=(Session&&) noexcept = default;

void Session::read(const std::string& text) {
  std::vector<TokenId> ids;
  m_impl->comm.agree_on_root([&] {
    const bool is_first = !m_impl->has_context();
    if (text.empty()) throw Error("there is nothing to read: the text is empty");
    const Tokenizer& tokenizer = *m_impl->tokenizer;
    ids = is_first ? m_impl->form.context(tokenizer, text) : tokenizer.encode(text);
  });
  m_impl->read(std::move(ids));
}

void Session::read(const std::vector<ChatMessage>& messages) {
  std::vector<TokenId> ids;
  m_impl->comm.agree_on_root([&] {
    if (!m_impl->chat_template) throw Error("messages need a chat template");
    if (m_impl->has_context()) throw Error("messages are read first, before any other context");
    if (messages.empty() || messages.back().role != ChatRole::user) {
      throw Error("the last message is not the user's; the question continues it");
    }
    const std::string text = m_impl->chat_template->render(messages, m_impl->options.thinking);
    const std::string& suffix = m_impl->form.parts->suffix;
    if (text.size() < suffix.size() ||
        text.compare(text.size() - suffix.size(), suffix.size(), suffix) != 0) {
      throw Error("the chat template does not end the messages as it ends one message");
    }
    ids = m_impl->tokenizer->encode(text.substr(0, text.size() - suffix.size()));
  });
  m_impl->read(std::move(ids));
}

void Session::read(const std::vector<TokenId>& ids) { m_impl->read(ids); }

std::string Session::ask(const std::string& question, const AskOptions& options) {
  return m_impl->ask(question, options);
}

const std::vector<TokenId>& Session::answer() const { return m_impl->answered; }

SessionReport Session::report() {
  return {static_cast<std::int64_t>(m_impl->generator->context().size()),
          m_impl->generator->report()};
}

void Session::save(const fs::path& file) {
  SnapshotInfo info;
  m_impl->comm.agree([&] {
    if (!m_impl->has_context()) throw Error("there is no context to save: read one first");
  });
  m_impl->comm.agree_on_root([&] { info = m_impl->info(); });
  m_impl->generator->write_snapshot(file, std::move(info), {});
}

Session Session::resume(const fs::path& file, const Communicator& communicator,
                        SessionOptions options, const fs::path& folder) {
  std::optional<SnapshotReader> reader;
  Pruning pruning;
  fs::path model = folder;
  communicator.agree([&] {
    reader.emplace(file);
    const SnapshotInfo& info = reader->header().info;
    try {
      pruning = Pruning::parse(attribute<std::string>(info, pruning_attribute));
      options.chat_template = attribute<std::int64_t>(info, template_attribute) != 0;
      options.thinking = attribute<std::int64_t>(info, thinking_attribute) != 0;
      options.system.reset();
      if (info.further.count(system_attribute) > 0) {
        options.system = attribute<std::string>(info, system_attribute);
      }
      options.dtype = reader->header().dtype;
      if (model.empty()) model = info.model;
      const session::ModelHashes hashes = session::hashes_of_model(model, true);
      check_hash("model", hashes.model, info.model_hash);
      check_hash("tokenizer", hashes.tokenizer, info.tokenizer_hash);
      check_hash("surrogate", surrogate_hash(pruning.surrogate),
                 attribute<std::string>(info, surrogate_hash_attribute));
    } catch (const std::exception& error) {
      throw Error(fmt::format("snapshot {}: {}", file.string(), error.what()));
    }
  });
  auto impl = std::make_unique<Impl>(model, pruning, communicator, std::move(options));
  impl->generator->resume(*reader, /*reusable*/ true);
  return Session(std::move(impl));
}

}  // namespace kvzap
