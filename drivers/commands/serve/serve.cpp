#include "commands/serve/serve.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <filesystem>
#include <kvzap/engine/engine.hpp>
#include <kvzap/engine/learn_from_texts.hpp>
#include <kvzap/engine/policies.hpp>
#include <kvzap/model/chat_template.hpp>
#include <kvzap/model/memory_plan.hpp>
#include <kvzap/server/executor.hpp>
#include <kvzap/server/protocol.hpp>
#include <kvzap/server/request_policies.hpp>
#include <kvzap/server/scheduler.hpp>
#include <limits>
#include <utility>
#include <vector>

#include "cache/agree_on_memory.hpp"
#include "commands/run/prompt.hpp"
#include "commands/serve/api_keys.hpp"
#include "commands/serve/store.hpp"
#include "commands/support/generator_setup.hpp"
#include "commands/support/model_loading.hpp"
#include "commands/support/policy_setup.hpp"
#include "commands/support/setup.hpp"
#include "console/console.hpp"
#include "console/signal_watch.hpp"
#include "console/signals.hpp"
#include "files/counted.hpp"
#include "files/json_file.hpp"
#include "files/quote.hpp"
#include "gguf/model_file.hpp"
#include "http/http_server.hpp"
#include "options/policy_options.hpp"
#include "server/sequence.hpp"
#include "session/prompt.hpp"

namespace kvzap::driver {
namespace {

using server::Executor;
using server::Scheduler;

constexpr int most_port = 65535;

/// The bytes of --prefix-memory. 0 keeps no states, and so does the byte that it becomes.
std::optional<std::int64_t> prefix_bytes(const ServeOptions& o) {
  if (o.prefix_memory.empty()) return {};
  return o.prefix_memory == "0" ? 1 : parse_bytes(o.prefix_memory, "--prefix-memory");
}

/// Returns the bytes of stored responses; 0: none is stored.
std::int64_t response_bytes(const ServeOptions& o) {
  return o.response_memory == "0" ? 0 : parse_bytes(o.response_memory, "--response-memory");
}

bool has_all_origins(const ServeOptions& o) {
  return std::find(o.allowed_origins.begin(), o.allowed_origins.end(), "*") !=
         o.allowed_origins.end();
}

/// Runs the command, from checks of the options to the end of the server.
class Serving {
 public:
  Serving(ServeOptions& options, const Communicator& comm, const std::string& version,
          const std::string& revision, const OwnRequests* own = nullptr)
      : m_options(options),
        m_comm(comm),
        m_version(version),
        m_revision(revision),
        m_own(own),
        m_talks(comm.is_root()) {
    if (m_options.quiet) m_talks = false;
  }
  int operator()();

 private:
  void check_options();
  void listen();
  void load_policy();
  void open_store();
  int answer_own(Scheduler& scheduler, const Executor& executor);
  std::unique_ptr<Engine> make_engine(Progress& bar);
  double share() const;
  std::size_t kv_limit() const;
  std::size_t prefix_limit(const Engine& engine) const;
  int run(Engine& engine);

  ServeOptions& m_options;
  const Communicator& m_comm;
  std::string m_version, m_revision;
  const OwnRequests* m_own;
  bool m_talks;
  std::optional<StopWatch> m_watch;
  std::optional<ModelSetup> m_setup;
  CacheOptions m_cache;
  server::EngineSet::Make m_make_engine;
  std::optional<RepeatPrompt> m_repeat;  // for policies that have the model repeat the context
  Texts m_texts;
  server::ServedModel m_model;
  std::unique_ptr<HttpServer> m_http;  // on rank 0
  std::unique_ptr<server::PrefixStore> m_store;
  std::vector<server::GenerationRequest> m_own_requests;
};

void Serving::check_options() {
  m_comm.agree([&] {
    resolve_pruning(m_options);
    take_recommended(m_options);
    driver::check_options(m_options);
  });
  resolve_threshold(m_options, m_talks, m_comm);
  agree_on_usage(m_comm, [&] {
    m_cache.pruning = m_options.pruning;
    m_cache.page_rows = m_options.page_rows;
    m_cache.balance = m_options.balance;
    m_cache.page_format = page_format(m_options.kv_type, m_options.dtype);
    m_cache.read_pages = read_pages(m_options.read_pages);
    m_cache.trim = false;  // the scheduler decides when
    m_setup = set_up_model(m_options.model, m_options.layers, m_options.placement, m_comm.size(),
                           m_options.rope);
    m_model.vocabulary = m_setup->config.vocab_size;
    m_model.max_tokens =
        context_limit(m_options.max_context, m_setup->config, m_options.random_weights.has_value());
    check_parts(m_options.model, !m_options.random_weights, !m_options.random_weights);
    const GenerationConfig rules =
        rules_of_answers(m_options.model, m_setup->config.vocab_size, m_options.sampling_flags);
    m_model.sampling = sampling_in_force(m_options.sampling, m_options.sampling_flags, rules);
    m_model.has_seed = m_options.seed.has_value();
    m_model.sampling.seed = m_options.seed.value_or(0);
    m_model.stop_ids = rules.stop_ids;
    if (m_comm.is_root()) print_rules(rules, m_options.sampling_flags, m_talks);
  });
  const std::int64_t longest =
      m_model.max_tokens > 0 ? m_model.max_tokens : std::numeric_limits<std::int64_t>::max();
  m_cache.pruning.window = ring_rows(m_cache.pruning.window, longest);
  m_options.scheduling.max_tokens = m_model.max_tokens;
  m_comm.agree_on_root([&] {
    print_notes(*m_setup, m_talks);
    const std::filesystem::path folder = m_options.model;
    const std::string own = folder.filename().empty() ? folder.parent_path().filename().string()
                                                      : folder.filename().string();
    m_model.name = !m_options.alias.empty() ? m_options.alias : own.empty() ? m_options.model : own;
    m_model.created = static_cast<std::int64_t>(std::time(nullptr));
    m_model.thinking = m_options.thinking == "on";
    m_model.max_choices =
        std::min<std::int64_t>(m_model.max_choices, m_options.scheduling.max_sequences);
    m_model.max_prompts =
        std::min<std::int64_t>(m_model.max_prompts, m_options.scheduling.max_queue);
    m_model.max_inputs = std::min<std::int64_t>(m_model.max_inputs, m_options.scheduling.max_queue);
    m_model.hidden_size = m_setup->config.hidden_size;
    m_model.pooling = m_options.pooling == "mean" ? server::Pooling::mean : server::Pooling::last;
    if (const std::int64_t bytes = response_bytes(m_options)) {
      constexpr std::size_t most_responses = 4096;
      m_model.responses =
          std::make_shared<server::ResponseStore>(static_cast<std::size_t>(bytes), most_responses);
    }
    if (gguf::has_model_file(folder, "tokenizer.json") || !m_options.random_weights) {
      m_model.tokenizer = Tokenizer::load(m_options.model);
      m_model.longest_token = server::longest_token(*m_model.tokenizer);
      m_model.grammars =
          server::answer_grammars(*m_model.tokenizer, m_setup->config.vocab_size, m_model.stop_ids);
    } else if (m_talks) {
      say("kvzap: note: no tokenizer: prompts and answers are token ids\n");
    }
    if (!m_model.tokenizer) return;
    try {
      m_model.chat_template = ChatTemplate::detect(m_options.model);
    } catch (const Error& error) {
      if (m_talks) say("kvzap: note: no /v1/chat/completions: {}\n", error.what());
    }
  });
}

/// Listens before the weights are loaded, which may take minutes, so that a wrong address fails
/// early.
void Serving::listen() {
  m_comm.agree_on_root([&] {
    HttpOptions http;
    http.host = m_options.host.front() == '[' ? m_options.host.substr(1, m_options.host.size() - 2)
                                              : m_options.host;
    http.port = m_options.port;
    http.api_keys = read_keys(m_options.api_key_file);
    if (const std::string key = key_in_environment(); !key.empty()) http.api_keys.push_back(key);
    http.allowed_hosts = m_options.allowed_hosts;
    http.logs = m_talks;
    http.logs_prompts = m_options.log_prompts;
    http.logs_json = m_options.log_format == "json";
    http.allowed_origins = m_options.allowed_origins;
    http.version = m_version;
    http.revision = m_revision;
    // Connections for running and waiting requests, and many more for clients that have not asked
    // yet: the more there are, the longer a new one may take for its request while others come.
    constexpr std::int64_t others = 1024, most = 8192;
    http.max_connections = static_cast<std::size_t>(std::min(
        most, m_options.scheduling.max_sequences + m_options.scheduling.max_queue + others));
    m_http = std::make_unique<HttpServer>(http);
    if (!m_http->is_loopback() && http.api_keys.empty() && m_talks) {
      say("kvzap: warning: --host {}: everybody who reaches this address can use the server; "
          "set --api-key-file to require a key\n",
          files::shown_message(http.host));
    }
    if (has_all_origins(m_options) && http.api_keys.empty() && m_talks) {
      say("kvzap: warning: --allowed-origin *: every page that a browser on this machine shows can "
          "use the server; set --api-key-file to require a key\n");
    }
  });
}

void Serving::load_policy() {
  const Tokenizer* const tokenizer = m_model.tokenizer ? &*m_model.tokenizer : nullptr;
  Pruning repeated = m_options.pruning;
  const bool repeats = repeated.prunes() && repeated.info()->repeats_context &&
                       !repeated.info()->repeats_without_words;
  if (repeats || m_options.request_policies == "on") {
    try {
      const auto repeating =
          std::find_if(policies().begin(), policies().end(),
                       [](const PolicyInfo& info) { return info.repeats_context; });
      if (!repeats) repeated = Pruning::parse(repeating->name);
      m_repeat =
          session::share_repeat_prompt(repeated, *m_setup, session::PromptSource::chat_template,
                                       tokenizer, {}, m_comm, flag_names());
    } catch (const AgreedError&) {
      if (repeats) throw;  // otherwise requests cannot name such a policy
    }
  }
  if (!m_options.pruning.prunes()) return;
  agree_on_usage(m_comm, [&] {
    m_cache.policy = driver::load_policy(m_options, m_repeat, *m_setup, m_comm).policy;
    constexpr std::int64_t most_tokens = std::int64_t{1} << 30;
    check_budget(m_options, *m_cache.policy, m_setup->config, most_tokens, m_cache.page_format);
  });
  m_texts = load_policy_texts(m_options, m_cache.policy.get(), *m_setup, tokenizer, m_comm);
}

void Serving::open_store() {
  if (m_options.prefix_store.empty()) return;
  m_comm.agree_on_root([&] {
    m_store = open_prefix_store(m_options, *m_setup, m_cache.pruning, m_model);
    if (m_own) m_own_requests = m_own->make(m_model);
  });
}

/// This rank's share of memory that an option gives to all ranks: that of its heads, with more
/// ranks than heads an even one.
double Serving::share() const {
  if (m_setup->partition.deals_projections()) return 1.0 / m_comm.size();
  std::int64_t own = 0, all = 0;
  for (int layer = 0; layer < m_setup->partition.n_layers(); ++layer) {
    own += static_cast<std::int64_t>(m_setup->partition.heads(layer, m_comm.rank()).size());
    all += m_setup->partition.n_kv_heads();
  }
  return static_cast<double>(own) / static_cast<double>(all);
}

/// Maximum bytes of this rank's kept states beside running sequences; 0: no limit but kv_limit.
std::size_t Serving::prefix_limit(const Engine& engine) const {
  if (const auto bytes = prefix_bytes(m_options)) {
    return static_cast<std::size_t>(std::max(1.0, static_cast<double>(*bytes) * share()));
  }
  if (!m_options.kv_memory.empty()) return 0;
  constexpr std::size_t contexts = 16;
  const std::size_t quarter = m_cache.kv_limit / 4;
  if (m_model.max_tokens == 0) return quarter;
  const std::size_t full =
      contexts * (engine.bytes_per_sequence() +
                  static_cast<std::size_t>(m_model.max_tokens) * engine.bytes_per_token());
  return quarter == 0 ? full : std::min(quarter, full);
}

/// Maximum bytes of this rank's rings and pages: its share of --kv-memory, or most of the free
/// memory after the weights are loaded. 0: the free memory is unknown.
std::size_t Serving::kv_limit() const {
  if (!m_options.kv_memory.empty()) {
    const auto bytes = static_cast<double>(parse_bytes(m_options.kv_memory, "--kv-memory"));
    return static_cast<std::size_t>(std::max(1.0, bytes * share()));
  }
  const std::int64_t available = available_bytes_of_node();
  if (available < 0) return 0;
  constexpr double used = 0.8;  // steps need the rest
  return static_cast<std::size_t>(used * static_cast<double>(available) / m_comm.ranks_on_node());
}

std::unique_ptr<Engine> Serving::make_engine(Progress& bar) {
  const ProgressCallback progress = [&](std::string_view what, std::int64_t done,
                                        std::int64_t total) {
    bar.update(what, done, total, what == "load" ? "" : "tokens");
    if (m_watch->signal() != 0) throw Error(stop_words);
  };
  const auto model =
      load_model(*m_setup, dtype_from_name(m_options.dtype), m_options.random_weights,
                 weight_storage_from_name(m_options.weights), m_comm, progress);
  if (!m_texts.empty()) {
    kvzap::learn_from_texts(model, *m_cache.policy, m_texts, m_comm, progress);
  }
  bar.clear();
  // All ranks load their weights before any rank measures the free memory.
  m_comm.agree([] {});
  m_cache.kv_limit = kv_limit();
  m_make_engine = [this, model](const PageFormat& format) {
    CacheOptions options = m_cache;
    options.page_format = format;
    std::unique_ptr<Engine> made;
    cache::agree_on_memory(
        m_comm, [&] { made = Engine::create(model, m_cache.scorer(), options, m_comm); });
    return made;
  };
  std::unique_ptr<Engine> engine = m_make_engine(m_cache.page_format);
  m_comm.agree([&] {
    const std::size_t least =
        engine->bytes_per_sequence() +
        static_cast<std::size_t>(m_cache.page_rows) * engine->bytes_per_token();
    if (m_cache.kv_limit > 0 && m_cache.kv_limit < least) {
      throw Error(
          fmt::format("--kv-memory: rank {} gets {} bytes of it; expected at least {}, for "
                      "one short sequence",
                      m_comm.rank(), m_cache.kv_limit, least));
    }
  });
  return engine;
}

int Serving::run(Engine& engine) {
  const ModelConfig whole = m_setup->whole_config();
  const PolicySetup setup{
      whole,  m_setup->partition_of_all_layers, dtype_from_name(m_options.dtype), m_setup->folder,
      m_comm, m_setup->config.num_hidden_layers};
  const server::RequestPolicies policies(engine, setup, m_repeat,
                                         m_options.request_policies == "on");
  Executor executor(
      engine, [&](const Pruning& pruning) { return policies.load(pruning); }, {}, m_make_engine);
  if (!m_comm.is_root()) {
    executor.follow();
    return 0;
  }
  m_model.pruning_of = [&](const server::PruneWish& wish) { return policies.pruning_of(wish); };
  m_model.page_format_of = [&](const server::PruneWish& wish) {
    return policies.page_format_of(wish);
  };
  if (m_options.pruning.prunes()) {
    m_model.policy = m_options.pruning.info()->name;
    m_model.amounts = policies.amounts();
  }
  m_options.scheduling.max_prefix_bytes = prefix_limit(engine);
  m_options.scheduling.store = m_store.get();
  warn_of_lookup(engine, m_options.scheduling.lookup, m_talks);
  Scheduler scheduler(executor, m_options.scheduling);
  if (m_own) return answer_own(scheduler, executor);
  m_http->open(m_model, scheduler,
               m_cache.kv_limit > 0 ? std::optional<std::int64_t>(m_cache.kv_limit) : std::nullopt);
  const bool is_bare = m_options.host.find(':') == std::string::npos || m_options.host[0] == '[';
  say("kvzap: listening on http://{}:{}\n", is_bare ? m_options.host : "[" + m_options.host + "]",
      m_http->port());
  m_watch->begin(
      [&] {
        m_http->drain();
        scheduler.drain();
        if (m_talks) {
          say_without_waiting(fmt::format(
              "kvzap: signal {}: running requests have {} s; another signal, at least 1 s later, "
              "ends them\n",
              m_watch->signal(), m_options.drain_seconds));
        }
      },
      [&] { scheduler.stop(); }, m_options.drain_seconds);
  try {
    scheduler.run();
  } catch (const std::exception& error) {
    // Other ranks would wait for a plan, and connections for answers that never come.
    say("kvzap: error: rank 0: {}\n", files::shown_message(error.what()));
    m_comm.abort(1);
  }
  m_watch->end();
  m_http.reset();
  const server::SchedulerCounts counts = scheduler.counts();
  if (m_talks) {
    say_without_waiting(fmt::format(
        "kvzap: stopped: {} answered, {} cancelled, {} refused, {} failed; {}; {} of keys and "
        "values in use\n",
        files::counted(counts.finished, "request"), counts.cancelled, counts.refused, counts.failed,
        files::counted(counts.new_tokens, "token"), files::counted(engine.bytes().live, "byte")));
  }
  constexpr int by_signal = 128;
  return m_watch->has_cut() ? by_signal + m_watch->signal() : 0;
}

/// Runs the requests of another command. For rank 0.
int Serving::answer_own(Scheduler& scheduler, const Executor& executor) {
  struct Ended final : server::Listener {
    std::string error;
    bool on_token(int, TokenId, const server::TokenLogprobs*) override { return true; }
    void on_end(int, const server::Ending&) override {}
    void on_error(const server::RequestError& of) override { error = of.what; }
  };
  const std::string kind =
      m_store->kind_of(executor.standard(), executor.engine().options().page_format);
  std::vector<std::shared_ptr<Ended>> ended;
  std::vector<server::PrefixKey> keys;
  for (server::GenerationRequest& request : m_own_requests) {
    ended.push_back(std::make_shared<Ended>());
    keys.emplace_back();
    for (const auto& segment : request.prompt) server::append_segment(keys.back(), segment);
    try {
      scheduler.submit(std::move(request), ended.back());
    } catch (const Error& error) {
      ended.back()->error = error.what();
    }
  }
  const auto stop = [&] { scheduler.stop(); };
  m_watch->begin(stop, stop, 0);
  scheduler.drain();
  scheduler.run();
  m_watch->end();
  std::vector<OwnRequests::Result> results;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const auto found = m_store->find(kind, keys[i], static_cast<std::int64_t>(keys[i].size()));
    const bool is_stored = found && found->state.key == keys[i];
    results.push_back({ended[i]->error, is_stored ? found->state.id : ""});
  }
  const int status = m_own->finish(results);
  constexpr int by_signal = 128;
  return m_watch->signal() != 0 ? by_signal + m_watch->signal() : status;
}

int Serving::operator()() {
  m_watch.emplace(m_comm.is_root());
  check_options();
  use_threads(m_options.threads, m_comm, m_talks);
  if (!m_own) listen();
  load_policy();
  open_store();
  const int ranks_on_node = m_comm.ranks_on_node();
  m_comm.agree([&] {
    const MemoryPlan plan =
        plan_memory(m_setup->config,
                    {dtype_from_name(m_options.dtype), 1, 0, m_comm.size(), m_cache.pruning.window,
                     0, quantised_bytes(m_options, m_setup->config, m_comm.size())});
    std::int64_t most = 0;
    for (const auto& rank : plan.ranks) most = std::max(most, rank.weights + rank.activations);
    check_memory(most, ranks_on_node, "weights");
  });
  Progress bar(m_talks, m_options.progress);
  std::unique_ptr<Engine> engine;
  try {
    engine = make_engine(bar);
  } catch (const Error& error) {
    if (!is_stop(error)) throw;
    const int signal = static_cast<int>(m_comm.all_reduce_max(std::int64_t{m_watch->signal()}));
    bar.clear();
    if (m_talks) say("kvzap: stopped by signal {} while loading weights\n", signal);
    m_http.reset();
    constexpr int by_signal = 128;
    return by_signal + signal;
  }
  // All ranks return the same status.
  return static_cast<int>(m_comm.all_reduce_max(std::int64_t{run(*engine)}));
}

void declare_responses(CLI::App& app, ServeOptions& o, const char* group) {
  app.add_option("--response-memory", o.response_memory,
                 "memory for the responses of /v1/responses that later requests may name; 0: store "
                 "none")
      ->capture_default_str()
      ->type_name("SIZE")
      ->group(group);
}

/// Options of clients and their access.
void declare_access(CLI::App& app, ServeOptions& o) {
  const auto server = "Server";
  app.add_option("--host", o.host, "address to listen on; 0.0.0.0 or :: for all addresses")
      ->capture_default_str()
      ->type_name("NAME")
      ->group(server);
  app.add_option("--port", o.port, "port to listen on; 0: any free port")
      ->capture_default_str()
      ->group(server);
  app.add_option(
         "--api-key-file", o.api_key_file,
         "file with API keys, one a line; each request needs one of them, or the one in the "
         "environment variable KVZAP_API_KEY; default: no key needed")
      ->type_name("FILE")
      ->group(server);
  app.add_option("--allowed-hosts", o.allowed_hosts,
                 "further names by which clients reach the server, without patterns, separated by "
                 "commas; default: "
                 "without keys on a loopback address only localhost and loopback addresses, "
                 "otherwise all names")
      ->delimiter(',')
      ->type_name("LIST")
      ->group(server);
  app.add_option("--allowed-origin", o.allowed_origins,
                 "origins of other servers' pages that may use this one, separated by commas, as "
                 "https://chat.example.org; *: all; default: none")
      ->delimiter(',')
      ->type_name("LIST")
      ->group(server);
  app.add_option("--alias", o.alias, "model name for clients; default: the folder's name")
      ->type_name("NAME")
      ->group(server);
}

}  // namespace

void declare_serve(CLI::App& app, ServeOptions& o) {
  declare_model(app, o);
  declare_context(app, o);
  declare_pruning(app, o);
  declare_sampling(app, o.sampling, o.sampling_flags, "Generation");
  declare_lookup(app, o.scheduling.lookup, "Generation");
  declare_console(app, o);
  const auto describe = [&](const char* name, const char* text) {
    app.get_option(name)->description(text);
  };
  describe("--ctx-size",
           "maximum tokens of prompt and answer together; default: the model's "
           "max_position_embeddings, extended by its RoPE scaling (no limit with "
           "--random-weights)");
  describe("--random-weights",
           "draw weights from this seed; without a tokenizer.json prompts are token ids");
  describe("--evict-ratio",
           "evict this share of a prompt's pairs, in [0, 1); with --surrogate and without --policy "
           "by the threshold that kvzap calibrate found for it");
  describe("--prune",
           "tokens to judge, unless a request sets it: none, prefill (user messages) or always "
           "(answers too, by a threshold); default: prefill with a policy, none without");
  describe("--kv-type",
           "type of keys and values that have left the window, unless a request sets it: q8 (8 "
           "bits), q4, q3, q2, two of them for keys and values, as in q8,q4, or that of --dtype; "
           "default: --dtype");
  describe("--thinking", "let a Qwen3 model think before it answers, unless a request sets it");
  describe("--quiet", "print only errors and the address on standard error");
  declare_access(app, o);
  const auto server = "Server";
  app.add_option("--kv-memory", o.kv_memory,
                 "memory for the keys and values of all requests and kept prompts, over all ranks: "
                 "512M, 2GB, 1.5GiB; default: four fifths of the free memory after the weights are "
                 "loaded")
      ->type_name("SIZE")
      ->group(server);
  app.add_option("--prefix-memory", o.prefix_memory,
                 "memory for kept states of earlier prompts beside running requests, over all "
                 "ranks; 0: keep none; default: all of --kv-memory if it is set, otherwise 16 full "
                 "contexts, at "
                 "most a fifth of the free memory")
      ->type_name("SIZE")
      ->group(server);
  declare_responses(app, o, server);
  declare_prefix_store(app, o, server);
  app.add_option("--max-batch-tokens", o.scheduling.max_batch_tokens,
                 "maximum tokens of a step: generated tokens and prompt chunks")
      ->capture_default_str()
      ->group(server);
  app.add_option("--max-sequences", o.scheduling.max_sequences, "maximum sequences of a step")
      ->capture_default_str()
      ->group(server);
  app.add_option("--max-queue", o.scheduling.max_queue,
                 "maximum requests that wait beside those for which there are places; others are "
                 "refused. Connections: the sum of "
                 "--max-sequences and this, plus 1024, at most 8192")
      ->capture_default_str()
      ->group(server);
  app.add_option("--request-policies", o.request_policies,
                 "let requests name a policy and a type of keys and values of their own; off: only "
                 "the server's amount and --prune can differ")
      ->capture_default_str()
      ->check(CLI::IsMember({"on", "off"}))
      ->group(server);
  app.add_option("--drain-seconds", o.drain_seconds,
                 "seconds to finish running requests after SIGTERM, SIGINT, SIGHUP or SIGUSR1; a "
                 "second signal, at least a second later, ends them after the current step")
      ->capture_default_str()
      ->group(server);
  app.add_option(
         "--pooling", o.pooling,
         "vectors of /v1/embeddings: the hidden state of the last token (last), or the mean "
         "over all tokens (mean)")
      ->capture_default_str()
      ->check(CLI::IsMember({"last", "mean"}))
      ->group(server);
  app.add_option("--log-format", o.log_format,
                 "form of the line that the log has for each request: a text or a JSON object")
      ->capture_default_str()
      ->check(CLI::IsMember({"text", "json"}))
      ->group(server);
  app.add_flag("--log-prompts", o.log_prompts, "log the text of prompts, too")->group(server);
  declare_seed(
      app, [&o](std::optional<std::uint64_t> seed) { o.seed = seed; }, "",
      "seed of the sampler for requests without one; default: a random seed for each request",
      "Generation");
}

void check_options(const ServeOptions& o) {
  PruningUse use;
  use.has_question = false;
  validate(o, use);
  check_sampling(o.sampling, o.sampling_flags);
  check_lookup(o.scheduling.lookup);
  require(o.port >= 0 && o.port <= most_port,
          fmt::format("--port is {}; expected 0 (any) to {}", o.port, most_port));
  require(!server_name(o.host).empty(),
          fmt::format("--host is {}; expected an address or a name", files::in_quotes(o.host)));
  const auto check_count = [](const char* flag, std::int64_t value) {
    constexpr std::int64_t most = std::int64_t{1} << 24;
    require(value >= 1 && value <= most,
            fmt::format("{} is {}; expected 1 to {}", flag, value, most));
  };
  check_count("--max-batch-tokens", o.scheduling.max_batch_tokens);
  check_count("--max-sequences", o.scheduling.max_sequences);
  check_count("--max-queue", o.scheduling.max_queue);
  require(o.drain_seconds >= 0 && std::isfinite(o.drain_seconds),
          fmt::format("--drain-seconds is {}; expected 0 or more", o.drain_seconds));
  if (!o.kv_memory.empty()) parse_bytes(o.kv_memory, "--kv-memory");
  prefix_bytes(o);
  response_bytes(o);
  check_prefix_store(o);
  for (const std::string& name : o.allowed_hosts) {
    require(!server_name(name).empty() && name.find('*') == std::string::npos,
            fmt::format("--allowed-hosts has {}; expected names or addresses without patterns, as "
                        "in chat.example.org,10.0.0.1",
                        files::in_quotes(name)));
  }
  for (const std::string& origin : o.allowed_origins) {
    require(is_origin(origin),
            fmt::format("--allowed-origin has {}; expected origins without a path, as in "
                        "https://chat.example.org, or *",
                        files::in_quotes(origin)));
  }
}

int serve(ServeOptions& options, const Communicator& comm, const std::string& version,
          const std::string& revision) {
  return Serving(options, comm, version, revision)();
}

int answer_own(ServeOptions& options, const OwnRequests& requests, const Communicator& comm) {
  return Serving(options, comm, {}, {}, &requests)();
}

}  // namespace kvzap::driver
