#include "llm.hpp"

#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <kvzap/server/scheduler.hpp>
#include <limits>
#include <string_view>
#include <tuple>
#include <utility>

#include "arrays.hpp"
#include "model/find_model.hpp"

namespace kvzap::python {
namespace {

namespace fs = std::filesystem;

class Timer {
 public:
  explicit Timer(double& seconds) : m_seconds(seconds) {}
  ~Timer() {
    m_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - m_begin).count();
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

 private:
  double& m_seconds;
  std::chrono::steady_clock::time_point m_begin = std::chrono::steady_clock::now();
};

/// Communicator of mpi4py, or None for this process alone. Starts MPI if it has to.
Communicator communicator_of(const nb::object& comm) {
  ensure_running();
  if (comm.is_none()) return Communicator::self();
#if KVZAP_HAVE_MPI
  const nb::object address = nb::module_::import_("mpi4py.MPI").attr("_addressof")(comm);
  return Communicator(*reinterpret_cast<MPI_Comm*>(
      as<std::uintptr_t>(address, "comm", "a communicator of mpi4py")));
#else
  throw Error("comm: this package is built without MPI; see docs/guide/python.md");
#endif
}

/// Sampling options of keyword arguments; false if there are none.
bool take_sampling(nb::dict& given, SamplingOptions& sampling) {
  bool any = false;
  const auto take = [&](const char* name, auto& field) {
    if (!given.contains(name)) return;
    field = as<std::decay_t<decltype(field)>>(given[name], name, "a number in its range");
    nb::del(given[name]);
    any = true;
  };
  take("temperature", sampling.temperature);
  take("top_k", sampling.top_k);
  take("top_p", sampling.top_p);
  take("min_p", sampling.min_p);
  take("seed", sampling.seed);
  take("presence_penalty", sampling.presence_penalty);
  take("frequency_penalty", sampling.frequency_penalty);
  take("repeat_last_n", sampling.repeat_last_n);
  return any;
}

/// Sets the grammar of keyword arguments. Collective. Returns whether there is one.
bool take_grammar(nb::dict& given, Session& session, SamplingOptions& sampling) {
  for (const char* const name : {"json_schema", "grammar", "regex"}) {
    if (!given.contains(name)) continue;
    const std::string kind = name;
    const auto text = as<std::string>(given[name], name, "valid text");
    nb::del(given[name]);
    sampling.grammar = in_engine([&] {
      return session.grammar([&](std::shared_ptr<const TokenGrammar::Vocabulary> words) {
        return kind == "json_schema" ? TokenGrammar::from_json_schema(std::move(words), text)
               : kind == "grammar"   ? TokenGrammar::from_gbnf(std::move(words), text)
                                   : TokenGrammar::from_regular_expression(std::move(words), text);
      });
    });
    return true;
  }
  return false;
}

/// Raises TypeError for a keyword that is not known.
void require_none_left(const nb::dict& given) {
  for (const auto& [name, value] : given) {
    throw nb::type_error(
        ("unexpected keyword argument '" + nb::cast<std::string>(name) + "'").c_str());
  }
}

/// Progress of a session: looks for signals, then tells Python.
ProgressCallback progress_of(const nb::object& callback) {
  if (callback.is_none()) {
    return [](std::string_view, std::int64_t, std::int64_t) { check_signals(); };
  }
  return [owned = held(callback)](std::string_view what, std::int64_t done, std::int64_t total) {
    check_signals();
    with_interpreter([&] { (*owned)(std::string(what), done, total); });
  };
}

/// -1: until the longest context.
std::int64_t max_new_tokens_of(const nb::object& given) {
  const auto most = as<std::int64_t>(given, "max_new_tokens", "a whole number");
  return most == -1 ? std::numeric_limits<std::int32_t>::max() : most;
}

void require_callable(const nb::object& given, const char* name) {
  if (given.is_none() || PyCallable_Check(given.ptr()) != 0) return;
  const std::string found = nb::type_name(given.type()).c_str();
  throw nb::type_error((std::string(name) + ": expected a function, found " + found).c_str());
}

std::vector<ChatMessage> messages_of(const nb::sequence& messages) {
  std::vector<ChatMessage> result;
  for (const nb::handle& entry : messages) {
    const auto message = as<nb::dict>(entry, "message", "a dict with role and content");
    const auto role = as<std::string>(message["role"], "role", "a text");
    const auto text = as<std::string>(message["content"], "content", "a text");
    const auto named = [&](ChatRole one) { return name_of(one) == role; };
    const ChatRole roles[] = {ChatRole::system, ChatRole::user, ChatRole::assistant};
    const auto* const found = std::find_if(std::begin(roles), std::end(roles), named);
    if (found == std::end(roles)) {
      throw nb::value_error(
          ("role: expected system, user or assistant, found \"" + role + '"').c_str());
    }
    result.push_back({*found, text});
  }
  return result;
}

/// Reads a text, messages ({"role", "content"}) or token ids.
void read(HeldSession& held, const nb::object& content) {
  const auto run = [&](const auto& value) {
    in_engine([&] {
      const Timer timer(held.read_seconds);
      (*held).read(value);
    });
  };
  if (nb::isinstance<nb::str>(content))
    return run(as<std::string>(content, "content", "valid text"));
  const auto sequence = as<nb::sequence>(content, "content", "a text, messages or token ids");
  if (nb::len(sequence) > 0 && nb::isinstance<nb::dict>(sequence[0])) {
    return run(messages_of(sequence));
  }
  run(as<std::vector<TokenId>>(content, "content", "a text, messages or token ids (int32)"));
}

std::string ask(HeldSession& held, const nb::object& text, const nb::object& max_new_tokens,
                const nb::object& on_text, nb::dict sampling) {
  const auto question = as<std::string>(text, "question", "a text");
  AskOptions options;
  options.max_new_tokens = max_new_tokens_of(max_new_tokens);
  SamplingOptions own = in_engine([&] { return (*held).options().sampling; });
  const bool has_grammar = take_grammar(sampling, *held, own);
  if (take_sampling(sampling, own) || has_grammar) options.sampling = own;
  require_none_left(sampling);
  require_callable(on_text, "on_text");
  options.on_text = [&](std::string_view piece) {
    check_signals();
    if (on_text.is_none()) return true;
    return with_interpreter([&] {
      const nb::object goes_on = on_text(nb::str(piece.data(), piece.size()));
      return goes_on.ptr() != Py_False;
    });
  };
  return in_engine([&] {
    const Timer timer(held.answer_seconds);
    return (*held).ask(question, options);
  });
}

nb::dict report(HeldSession& held) {
  const auto [report, pruning] =
      in_engine([&] { return std::make_pair((*held).report(), (*held).pruning().text()); });
  nb::dict result = report_fields(report.cache);
  result["pruning"] = pruning;
  result["context_tokens"] = report.context_tokens;
  result["answer_tokens"] = report.answer_tokens;
  result["stop_reason"] =
      report.stop_reason ? std::string(name_of(*report.stop_reason)) : std::string();
  result["read_seconds"] = held.read_seconds;
  result["answer_seconds"] = held.answer_seconds;
  return result;
}

void check_head(Session& session, std::int64_t layer, std::int64_t head) {
  const ModelConfig& config = session.config();
  require_index("layer", layer, config.num_hidden_layers);
  Generator& generator = session.generator();
  if (generator.sequence() < 0) throw Error("there is no context: read one first");
  // Several ranks have some heads each.
  const auto heads =
      generator.engine().communicator().size() == 1
          ? config.kv_heads_of(layer)
          : static_cast<std::int64_t>(generator.scores(static_cast<int>(layer)).size());
  require_index("head", head, heads);
}

auto positions(HeldSession& held, std::int64_t layer, std::int64_t head) {
  return array_of(in_engine([&] {
    check_head(*held, layer, head);
    return (*held).generator().positions(static_cast<int>(layer), static_cast<int>(head));
  }));
}

auto scores(HeldSession& held, std::int64_t layer, std::int64_t head) {
  return array_of(in_engine([&] {
    check_head(*held, layer, head);
    auto all = (*held).generator().scores(static_cast<int>(layer));
    return std::move(all.at(static_cast<std::size_t>(head)));
  }));
}

auto rows(HeldSession& held, std::int64_t layer, std::int64_t head, bool values) {
  std::vector<float> result;
  std::size_t dim = 1;
  in_engine([&] {
    check_head(*held, layer, head);
    Generator& generator = (*held).generator();
    dim = static_cast<std::size_t>((*held).config().head_dim_of(layer));
    result = generator.engine().rows(generator.sequence(), static_cast<int>(layer),
                                     static_cast<int>(head), values);
  });
  return matrix_of(std::move(result), dim);
}

/// Collects the answers of a batch.
class Answers final : public server::Listener {
 public:
  bool on_token(int, TokenId token, const server::TokenLogprobs*) override {
    tokens.push_back(token);
    return true;
  }
  void on_end(int, const server::Ending& ending) override {
    switch (ending.reason) {
      case server::EndReason::max_new_tokens:
        stop_reason = name_of(StopReason::max_new_tokens);
        break;
      case server::EndReason::context_full:
        stop_reason = name_of(StopReason::context_full);
        break;
      default:
        stop_reason = name_of(StopReason::stop_id);
    }
  }
  void on_error(const server::RequestError& of) override { error = of.what; }

  std::vector<TokenId> tokens;
  std::string stop_reason, error;
};

using Prompt = std::pair<std::vector<TokenId>, std::vector<TokenId>>;  // context, question
using Answer = std::pair<std::string, std::string>;                    // text, reason of its end

/// Answers prompts on rank 0's scheduler; other ranks follow.
std::vector<Answer> run_scheduler(Session& session, server::Executor& executor,
                                  const std::vector<Prompt>& prompts, std::int64_t max_new_tokens,
                                  const SamplingOptions& sampling) {
  server::SchedulerOptions limits;
  limits.max_queue = static_cast<std::int64_t>(prompts.size());
  limits.max_tokens = session.max_context();
  limits.keeps_prefixes = false;
  limits.lookup = session.options().lookup;
  server::Scheduler scheduler(executor, limits);
  std::vector<std::shared_ptr<Answers>> answers;
  std::vector<server::Scheduler::Submission> submissions;
  for (const auto& [context, question] : prompts) {
    server::GenerationRequest request;
    request.prompt.push_back({server::Segment::Kind::context, context});
    if (!question.empty()) {
      request.prompt.push_back({server::Segment::Kind::question, question});
    }
    request.max_new_tokens = max_new_tokens;
    request.stop_ids = session.stop_ids();
    request.sampling = sampling;
    answers.push_back(std::make_shared<Answers>());
    submissions.push_back({std::move(request), answers.back()});
  }
  try {
    scheduler.submit(std::move(submissions));
    while (scheduler.step()) check_signals();
  } catch (...) {
    scheduler.stop();
    scheduler.run();  // ends the other ranks
    throw;
  }
  scheduler.drain();
  scheduler.run();
  std::vector<Answer> texts;
  for (std::size_t i = 0; i < answers.size(); ++i) {
    if (!answers[i]->error.empty()) {
      throw Error("prompt[" + std::to_string(i) + "]: " + answers[i]->error);
    }
    texts.emplace_back(session.decode(answers[i]->tokens), answers[i]->stop_reason);
  }
  return texts;
}

/// The same on all ranks; rank 0 has the answers.
std::vector<Answer> run_batch(Session& session, const std::vector<Prompt>& prompts,
                              std::int64_t max_new_tokens, const SamplingOptions& sampling) {
  server::Executor executor(session.generator().engine());
  const Communicator& comm = executor.engine().communicator();
  std::vector<Answer> texts(prompts.size());
  std::exception_ptr failure;
  if (comm.is_root()) {
    try {
      texts = run_scheduler(session, executor, prompts, max_new_tokens, sampling);
    } catch (...) {
      failure = std::current_exception();
    }
  } else {
    executor.follow();
  }
  comm.agree_on_root([&] {
    if (failure) std::rethrow_exception(failure);
  });
  return texts;
}

class Llm {
 public:
  Llm(const fs::path& model, const nb::object& pruning, SessionOptions options,
      const nb::object& comm)
      : m_base(in_engine([&, wanted = pruning_of(pruning, options), ranks = communicator_of(comm)] {
          return std::make_unique<HeldSession>(Session(model, wanted, ranks, options), "LLM");
        })),
        m_model(model::find_model(model.string())) {}

  std::unique_ptr<HeldSession> session() const {
    return in_engine([&] { return std::make_unique<HeldSession>((**m_base).another()); });
  }
  std::unique_ptr<HeldSession> resume(const fs::path& file) const {
    return in_engine([&] {
      Session session = (**m_base).another();
      session.load(file);
      return std::make_unique<HeldSession>(std::move(session));
    });
  }
  std::vector<Answer> generate(const nb::sequence& prompts, const nb::object& most,
                               nb::dict given) const {
    const std::int64_t max_new_tokens = max_new_tokens_of(most);
    if (max_new_tokens == 0) {
      throw Error("max_new_tokens is 0; expected 1 or more, or -1 for no limit");
    }
    SamplingOptions sampling = in_engine([&] { return (**m_base).options().sampling; });
    take_grammar(given, **m_base, sampling);
    take_sampling(given, sampling);
    require_none_left(given);
    std::vector<std::pair<std::string, std::string>> texts;
    for (const nb::handle& prompt : prompts) {
      if (nb::isinstance<nb::str>(prompt)) {
        texts.emplace_back(as<std::string>(prompt, "prompts", "valid text"), "");
      } else {
        const auto pair = as<nb::sequence>(prompt, "prompts", "texts, or pairs of texts");
        if (nb::len(pair) != 2) throw nb::type_error("prompts: expected texts, or pairs of texts");
        texts.emplace_back(as<std::string>(pair[0], "prompts", "a text as the context"),
                           as<std::string>(pair[1], "prompts", "a text as the question"));
      }
    }
    return in_engine([&] {
      Session& base = **m_base;
      if (base.generator().engine().options().pruning.moment == PruneMoment::question) {
        throw Error(
            "generate: prune-after question prunes a context with each question, one after the "
            "other: use session(), read and ask");
      }
      Session batch = base.another();
      const Communicator& comm = batch.generator().engine().communicator();
      auto count = static_cast<std::int64_t>(texts.size());
      comm.broadcast(&count, sizeof(count), 0);
      texts.resize(static_cast<std::size_t>(count));
      std::vector<Prompt> ids;
      for (const auto& [context, question] : texts) ids.push_back(base.prompt(context, question));
      if (ids.empty()) return std::vector<Answer>();
      return run_batch(batch, ids, max_new_tokens, sampling);
    });
  }

  const fs::path& model() const { return m_model; }
  const HeldSession& base() const { return *m_base; }
  void close() {
    in_engine([&] { m_base->close(); });
  }

 private:
  std::unique_ptr<HeldSession> m_base;
  fs::path m_model;
};

void bind_session(nb::module_& module) {
  nb::class_<HeldSession>(module, "_Session")
      .def("read", &read, nb::arg("content").none())
      .def("ask", &ask, nb::arg("question").none(), nb::arg("max_new_tokens").none(),
           nb::arg("on_text").none(), nb::arg("sampling"))
      .def("report", &report)
      .def("gather_pages",
           [](HeldSession& held) { in_engine([&] { (*held).generator().gather_pages(); }); })
      .def("positions", &positions, nb::arg("layer"), nb::arg("head"))
      .def("scores", &scores, nb::arg("layer"), nb::arg("head"))
      .def("rows", &rows, nb::arg("layer"), nb::arg("head"), nb::arg("values"))
      .def("answer_ids",
           [](HeldSession& held) { return array_of(in_engine([&] { return (*held).answer(); })); })
      .def("context_ids",
           [](HeldSession& held) {
             return array_of(in_engine([&] { return (*held).generator().context(); }));
           })
      .def("save",
           [](HeldSession& held, const fs::path& file) { in_engine([&] { (*held).save(file); }); })
      .def("pruning",
           [](HeldSession& held) { return in_engine([&] { return (*held).pruning(); }); })
      .def("live_bytes",
           [](HeldSession& held) {  // of repr, which does not wait
             return in_engine([&] { return (*held).generator().engine().bytes().live; },
                              Wait::never);
           })
      .def_prop_ro("is_closed", &HeldSession::is_closed)
      .def("close", [](HeldSession& held) { in_engine([&] { held.close(); }); });
}

}  // namespace

int threads_of(const nb::object& given) {
  constexpr int most = 4096;  // as of the program's --threads
  const auto threads = as<std::int64_t>(given, "threads", "a whole number");
  if (threads >= 0 && threads <= most) return static_cast<int>(threads);
  throw Error("threads is " + std::to_string(threads) + "; expected 1 to " + std::to_string(most) +
              ", or 0");
}

Pruning pruning_of(const nb::object& pruning, SessionOptions& options) {
  if (pruning.is_none()) return Pruning::none();
  if (nb::isinstance<ScorePolicy>(pruning)) {
    const auto& policy = nb::cast<const ScorePolicy&>(pruning);
    options.policy = policy.info;
    return policy.pruning;
  }
  Pruning result =
      nb::isinstance<nb::str>(pruning)
          ? Pruning::parse(as<std::string>(pruning, "pruning", "valid text"))
          : as<Pruning>(pruning, "pruning", "a Pruning, its text, a ScorePolicy or None");
  check(result);
  return result;
}

nb::dict report_fields(const CacheReport& cache) {
  std::vector<std::int64_t> kept;
  std::vector<double> ratios;
  for (std::size_t layer = 0; layer < cache.kept.size(); ++layer) {
    kept.insert(kept.end(), cache.kept[layer].begin(), cache.kept[layer].end());
    ratios.push_back(cache.evict_ratio(static_cast<int>(layer)));
  }
  const std::size_t layers = cache.kept.size();
  nb::dict result;
  result["tokens"] = cache.tokens;
  result["evict_ratio"] = cache.evict_ratio();
  result["layer_evict_ratios"] = array_of(std::move(ratios));
  result["kept"] = array_of(std::move(kept), {layers, layers > 0 ? cache.kept[0].size() : 0});
  result["full_bytes"] = cache.full_bytes;
  result["live_bytes"] = cache.live_bytes;
  result["allocated_bytes"] = cache.allocated_bytes;
  result["peak_allocated_bytes"] = cache.peak_allocated_bytes;
  result["returned_bytes"] = cache.returned_bytes;
  result["score_seconds"] = cache.score_seconds;
  result["prune_seconds"] = cache.prune_seconds;
  return result;
}

// A number of pages, a share as a float, or "all".
static ReadPages read_pages_of(const nb::object& given) {
  const auto text = as<std::string>(nb::str(given), "read_pages", "a text");
  try {
    return read_pages_from_name(text);
  } catch (const Error& error) {
    throw Error("read_pages " + std::string(error.what()));
  }
}

void bind_llm(nb::module_& module) {
  bind_session(module);
  nb::class_<Llm>(module, "_LLM")
      .def(
          "__init__",
          [](Llm* self, const fs::path& model, const nb::object& pruning, const nb::object& dtype,
             const nb::object& weights, const nb::object& threads, const nb::object& max_context,
             const nb::object& chat_template, const nb::object& thinking, const nb::object& system,
             const nb::object& progress, const nb::object& comm, const nb::object& kv_type,
             const nb::object& lookup, const nb::object& read_pages, nb::dict sampling) {
            const auto text = [](const nb::object& given, const char* name) {
              return as<std::string>(given, name, "a text");
            };
            SessionOptions options;
            options.dtype = dtype_from_name(text(dtype, "dtype"));
            if (!kv_type.is_none()) {
              options.page_format = page_format_from_name(text(kv_type, "kv_type"), options.dtype);
            }
            options.weights = weight_storage_from_name(text(weights, "weights"));
            options.threads = threads_of(threads);
            options.max_context = as<std::int64_t>(max_context, "max_context", "a whole number");
            options.chat_template = as<bool>(chat_template, "chat_template", "True or False");
            options.thinking = as<bool>(thinking, "thinking", "True or False");
            if (!system.is_none()) options.system = text(system, "system");
            require_callable(progress, "progress");
            options.progress = progress_of(progress);
            options.lookup = as<std::int64_t>(lookup, "lookup", "a whole number");
            options.read_pages = read_pages_of(read_pages);
            take_sampling(sampling, options.sampling);
            require_none_left(sampling);
            new (self) Llm(model, pruning, options, comm);
          },
          nb::arg("model"), nb::arg("pruning").none(), nb::arg("dtype").none(),
          nb::arg("weights").none(), nb::arg("threads").none(), nb::arg("max_context").none(),
          nb::arg("chat_template").none(), nb::arg("thinking").none(), nb::arg("system").none(),
          nb::arg("progress").none(), nb::arg("comm").none(), nb::arg("kv_type").none(),
          nb::arg("lookup").none(), nb::arg("read_pages").none(), nb::arg("sampling"))
      .def("session", &Llm::session)
      .def("resume", &Llm::resume, nb::arg("file"))
      .def("generate", &Llm::generate, nb::arg("prompts"), nb::arg("max_new_tokens").none(),
           nb::arg("sampling"))
      .def(
          "encode",
          [](const Llm& llm, const nb::object& given) {
            const auto text = as<std::string>(given, "text", "a text");
            return array_of(in_engine([&] { return (*llm.base()).encode(text); }));
          },
          nb::arg("text").none())
      .def(
          "decode",
          [](const Llm& llm, const nb::object& given) {
            const auto ids = as<std::vector<TokenId>>(given, "ids", "token ids (int32)");
            return in_engine([&] { return (*llm.base()).decode(ids); });
          },
          nb::arg("ids").none())
      .def("close", &Llm::close)
      .def_prop_ro("is_closed", [](const Llm& llm) { return llm.base().is_closed(); })
      .def("pruning",
           [](const Llm& llm) { return in_engine([&] { return (*llm.base()).pruning(); }); })
      .def("description", [](const Llm& llm) {
        const auto [config, options, limit, pruning] = in_engine([&] {
          const Session& session = *llm.base();
          return std::make_tuple(session.config(), session.options(), session.max_context(),
                                 session.pruning().text());
        });
        nb::dict result;
        result["model"] = llm.model().string();
        result["architecture"] = config.architecture;
        result["layers"] = config.num_hidden_layers;
        result["kv_heads"] = config.num_key_value_heads;
        result["query_heads"] = config.num_attention_heads;
        result["head_dim"] = config.head_dim;
        result["vocab_size"] = config.vocab_size;
        result["dtype"] = std::string(name_of(options.dtype));
        result["kv_type"] = name_of(options.page_format, options.dtype);
        result["read_pages"] = name_of(options.read_pages);
        result["max_context"] = limit;
        result["pruning"] = pruning;
        return result;
      });
}

}  // namespace kvzap::python
