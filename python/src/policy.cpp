// Eviction policies that are functions of Python.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <Kokkos_Core.hpp>
#include <cmath>
#include <kvzap/engine/policies.hpp>
#include <kvzap/engine/policy.hpp>
#include <kvzap/engine/pruning.hpp>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "arrays.hpp"
#include "files/ascii.hpp"
#include "llm.hpp"

namespace kvzap::python {
namespace {

/// A copy of a view on the host.
template <class View>
auto copied(const ExecutionSpace& exec, const View& view) {
  using Value = typename View::non_const_value_type;
  std::vector<std::size_t> shape;
  for (std::size_t i = 0; i < View::rank; ++i) shape.push_back(view.extent(i));
  exec.fence();
  const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), view);
  std::vector<Value> values;
  values.reserve(view.size());
  for (std::size_t i = 0; i < view.extent(0); ++i) {
    if constexpr (View::rank == 1) {
      values.push_back(host(i));
    } else {
      for (std::size_t j = 0; j < view.extent(1); ++j) {
        if constexpr (View::rank == 2) {
          values.push_back(host(i, j));
        } else {
          for (std::size_t k = 0; k < view.extent(2); ++k) values.push_back(host(i, j, k));
        }
      }
    }
  }
  return array_of(std::move(values), std::move(shape));
}

/// A layer as functions see it, during a call alone.
class Layer {
 public:
  Layer(PolicyLayer& layer, bool has_recent) : m_layer(&layer), m_has_recent(has_recent) {}

  void end() { m_layer = nullptr; }
  PolicyLayer& operator*() const {
    if (m_layer == nullptr) throw Error("the layer exists during the call of the policy alone");
    return *m_layer;
  }
  bool has_recent() const { return m_has_recent; }

 private:
  PolicyLayer* m_layer;
  bool m_has_recent;
};

/// Returns the argument `head`. Raises IndexError.
int head_of(const PolicyLayer& layer, const nb::object& given) {
  const auto head = as<std::int64_t>(given, "head", "a whole number");
  require_index("head", head, layer.heads());
  return static_cast<int>(head);
}

class FunctionPolicy final : public Policy {
 public:
  FunctionPolicy(std::shared_ptr<nb::object> function, std::string name, std::int64_t recent)
      : m_function(std::move(function)), m_name(std::move(name)), m_recent(recent) {}

  PolicyNeeds needs() const override {
    PolicyNeeds needs;
    needs.recent = m_recent;
    return needs;
  }
  void score(PolicyLayer& layer, const ScoreView& scores) override {
    const auto host = Kokkos::create_mirror_view(scores);
    try {
      score_heads(layer, host);
    } catch (const AgreedError& error) {  // see FailuresAsTexts
      throw AgreedError("policy " + m_name + ": " + error.what());
    }
    Kokkos::deep_copy(layer.exec(), scores, host);
    layer.exec().fence();
  }

 private:
  using Scores = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

  template <class Host>
  void score_heads(PolicyLayer& layer, const Host& host) const {
    with_interpreter([&] {
      const nb::object seen = nb::cast(Layer(layer, m_recent > 0));
      const auto end = [&] { nb::cast<Layer&>(seen).end(); };
      try {
        for (int head = 0; head < layer.heads(); ++head) call(seen, layer, head, host);
      } catch (...) {
        end();
        throw;
      }
      end();
    });
  }

  template <class Host>
  void call(const nb::object& seen, PolicyLayer& layer, int head, const Host& host) const {
    const nb::object result = (*m_function)(seen, head);
    const std::string begin = "scores of the policy " + m_name + ": ";
    const auto refuse = [&](const std::string& found) {
      throw nb::value_error(
          (begin + "expected shape (" + std::to_string(layer.rows(head)) + ",), found " + found)
              .c_str());
    };
    if (result.is_none()) refuse("None");
    const nb::object array = array_of_result(result, refuse);
    Scores scores;
    const bool is_right = nb::try_cast(array, scores) &&
                          static_cast<std::int64_t>(scores.shape(0)) == layer.rows(head);
    if (!is_right) refuse(nb::repr(array.attr("shape")).c_str());
    bool has_finite = scores.shape(0) == 0;
    for (std::size_t row = 0; row < scores.shape(0); ++row) {
      host(head, row) = scores(row);
      has_finite = has_finite || std::isfinite(scores(row));
    }
    const std::string warning =
        begin + "no score of a head is finite, so that its rows cannot be ranked";
    if (!has_finite && PyErr_WarnEx(PyExc_RuntimeWarning, warning.c_str(), 1) != 0) {
      throw nb::python_error();  // where warnings are errors
    }
  }

  /// Returns an array of any type that NumPy makes one of.
  template <class Refuse>
  static nb::object array_of_result(const nb::object& result, const Refuse& refuse) {
    try {
      return nb::module_::import_("numpy").attr("ascontiguousarray")(result,
                                                                     nb::arg("dtype") = "float32");
    } catch (const nb::python_error& error) {
      if (!error.matches(PyExc_Exception)) throw;
      refuse(std::string(nb::type_name(result.type()).c_str()) + " (" +
             nb::str(error.value()).c_str() + ")");
      throw;
    }
  }

  std::shared_ptr<nb::object> m_function;
  std::string m_name;
  std::int64_t m_recent;
};

/// Returns the letters, digits and underscores of a text.
std::string name_of_text(const std::string& text) {
  std::string name;
  for (const char c : text) {
    if (files::is_letter_or_digit(c) || c == '_') name += c;
  }
  return name.empty() ? "function" : name;
}

/// Returns the name that a user has given, or the function's.
std::string name_of(const nb::callable& function, const nb::object& given) {
  if (!given.is_none()) {
    auto name = as<std::string>(given, "name", "letters, digits and underscores");
    if (name == name_of_text(name)) return name;
    throw nb::value_error(
        ("name is \"" + name + "\"; expected letters, digits and underscores").c_str());
  }
  const nb::handle owner =
      nb::hasattr(function, "__name__") ? nb::handle(function) : function.type();
  return name_of_text(as<std::string>(owner.attr("__name__"), "function", "a name"));
}

template <class T>
std::optional<T> optional_of(const nb::object& given, const char* name, const char* expected) {
  if (given.is_none()) return std::nullopt;
  return as<T>(given, name, expected);
}

/// Returns the argument `recent`. Raises ValueError.
std::int64_t recent_of(const nb::object& given) {
  const auto recent = as<std::int64_t>(given, "recent", "a whole number");
  if (recent >= 0) return recent;
  throw nb::value_error(
      ("recent is " + std::to_string(recent) + "; expected 0 or more queries").c_str());
}

ScorePolicy score_policy(const nb::object& given, const nb::object& name,
                         const nb::object& given_evict_ratio, const nb::object& given_keep_tokens,
                         const nb::object& given_threshold, const nb::object& window,
                         const nb::object& sink, const nb::object& given_recent,
                         const nb::object& given_by_token) {
  const auto function = as<nb::callable>(given, "function", "a function");
  const auto evict_ratio = optional_of<double>(given_evict_ratio, "evict_ratio", "a number");
  const auto keep_tokens =
      optional_of<std::int64_t>(given_keep_tokens, "keep_tokens", "a whole number");
  const auto threshold = optional_of<double>(given_threshold, "threshold", "a number");
  const std::int64_t recent = recent_of(given_recent);
  const auto by_token = as<bool>(given_by_token, "by_token", "True or False");
  if (evict_ratio.has_value() + keep_tokens.has_value() + threshold.has_value() != 1) {
    throw nb::value_error("expected one of evict_ratio, keep_tokens and threshold");
  }
  ScorePolicy policy;
  policy.name = name_of(function, name);
  policy.is_named = !name.is_none();
  policy.function = held(function);
  policy.recent = recent;
  PolicyInfo info;
  info.name = "python";
  info.paper = "a function of Python";
  info.judges_tokens = by_token;
  info.scores_parts = recent == 0;
  info.make = [owned = policy.function, own_name = policy.name, recent](
                  const PolicyArguments&, const PolicySetup&) -> PolicyMaker {
    return [=] { return std::make_unique<FunctionPolicy>(owned, own_name, recent); };
  };
  policy.info = std::make_shared<const PolicyInfo>(std::move(info));
  policy.pruning.policy = PolicyText(policy.info);
  policy.pruning.window = as<int>(window, "window", "a whole number of tokens");
  policy.pruning.sink = as<std::int64_t>(sink, "sink", "a whole number of tokens");
  if (evict_ratio) policy.pruning.evict_ratio(*evict_ratio);
  if (keep_tokens) policy.pruning.keep_tokens(*keep_tokens);
  if (threshold) policy.pruning.threshold(*threshold);
  check(policy.pruning);
  return policy;
}

/// A policy that the program's texts name, and the function that it calls now.
struct NamedFunction {
  std::shared_ptr<nb::object> function;
  std::int64_t recent = 0;
  bool by_token = false;
};

/// All of them. Never freed: the list of policies outlives the interpreter.
std::map<std::string, NamedFunction>& named_functions() {
  static auto& all = *new std::map<std::string, NamedFunction>;
  return all;
}
std::mutex& named_functions_mutex() {
  static std::mutex mutex;
  return mutex;
}

std::unique_ptr<Policy> make_named(const std::string& name) {
  const std::lock_guard<std::mutex> guard(named_functions_mutex());
  const NamedFunction& named = named_functions().at(name);
  return std::make_unique<FunctionPolicy>(named.function, name, named.recent);
}

std::string add_policy(const nb::object& given, const nb::object& given_name,
                       const nb::object& given_recent, const nb::object& given_by_token) {
  const auto function = as<nb::callable>(given, "function", "a function");
  const std::string name = given_name.is_none() ? name_of(function, given_name)
                                                : as<std::string>(given_name, "name", "a name");
  NamedFunction named{held(function), recent_of(given_recent),
                      as<bool>(given_by_token, "by_token", "True or False")};
  const EngineLock lock(Wait::interruptibly);  // no engine reads the list
  const nb::gil_scoped_acquire acquire;        // nor does Python
  const std::lock_guard<std::mutex> guard(named_functions_mutex());
  const auto found = named_functions().find(name);
  if (found != named_functions().end()) {
    if (found->second.recent != named.recent || found->second.by_token != named.by_token) {
      throw Error("the policy " + name +
                  " has another recent or by_token; expected those, or another name");
    }
    std::swap(found->second, named);
    return name;
  }
  PolicyInfo info;
  info.name = name;
  info.paper = "a function of Python";
  info.judges_tokens = named.by_token;
  info.scores_parts = named.recent == 0;
  info.make = [name](const PolicyArguments&, const PolicySetup&) -> PolicyMaker {
    return [name] { return make_named(name); };
  };
  kvzap::add_policy(std::move(info));
  named_functions().emplace(name, std::move(named));
  return name;
}

/// What pickle and copy make a ScorePolicy of: a function of its function.
nb::tuple reduced(const ScorePolicy& policy) {
  const Pruning& pruning = policy.pruning;
  nb::dict options;
  if (const auto ratio = pruning.amount.evict_ratio) options["evict_ratio"] = *ratio;
  if (const auto tokens = pruning.amount.keep_tokens) options["keep_tokens"] = *tokens;
  if (const auto threshold = pruning.amount.threshold) options["threshold"] = *threshold;
  options["window"] = pruning.window;
  options["sink"] = pruning.sink;
  options["recent"] = policy.recent;
  options["by_token"] = policy.info->judges_tokens;
  if (policy.is_named) options["name"] = policy.name;
  const nb::object make =
      nb::module_::import_("functools").attr("partial")(nb::type<ScorePolicy>(), **options);
  return nb::make_tuple(make, nb::make_tuple(*policy.function));
}

void bind_layer(nb::module_& module) {
  // A function of a head that copies what `view` returns.
  const auto rows_of = [](auto view) {
    return [view](const Layer& layer, const nb::object& head) {
      PolicyLayer& own = *layer;
      return copied(own.exec(), view(own, head_of(own, head)));
    };
  };
  nb::class_<Layer>(module, "PolicyLayer",
                    "One layer of a sequence, as a policy of Python sees it; arrays are copies.")
      .def_prop_ro("layer", [](const Layer& layer) { return (*layer).layer(); })
      .def_prop_ro("layers", [](const Layer& layer) { return (*layer).extents().layers; })
      .def_prop_ro(
          "heads", [](const Layer& layer) { return (*layer).heads(); }, "KV heads of this process.")
      .def_prop_ro(
          "group", [](const Layer& layer) { return (*layer).extents().group; },
          "Query heads of each KV head.")
      .def_prop_ro("head_dim", [](const Layer& layer) { return (*layer).extents().head_dim; })
      .def_prop_ro(
          "tokens", [](const Layer& layer) { return (*layer).extents().tokens; },
          "Tokens of the sequence, kept or not.")
      .def_prop_ro("new_tokens", [](const Layer& layer) { return (*layer).extents().new_tokens; })
      .def(
          "rows",
          [](const Layer& layer, const nb::object& head) {
            return (*layer).rows(head_of(*layer, head));
          },
          nb::arg("head").none(), nb::sig("def rows(self, head: int) -> int"))
      .def("positions", rows_of([](PolicyLayer& layer, int head) { return layer.positions(head); }),
           nb::arg("head").none(),
           nb::sig("def positions(self, head: int) -> NDArray[numpy.int64]"),
           "Positions of the rows; int64 (rows).")
      .def("keys", rows_of([](PolicyLayer& layer, int head) { return layer.keys(head); }),
           nb::arg("head").none(), nb::sig("def keys(self, head: int) -> NDArray[numpy.float32]"),
           "Keys after RoPE; float32 (rows, head_dim).")
      .def("values", rows_of([](PolicyLayer& layer, int head) { return layer.values(head); }),
           nb::arg("head").none(), nb::sig("def values(self, head: int) -> NDArray[numpy.float32]"),
           "Values; float32 (rows, head_dim).")
      .def(
          "recent_queries",
          [](const Layer& layer) {
            PolicyLayer& own = *layer;
            if (!layer.has_recent()) {
              throw Error(
                  "recent_queries: the policy keeps none; expected ScorePolicy(..., recent=n)");
            }
            return copied(own.exec(), own.recent().queries);
          },
          "The newest queries after RoPE, as many as the policy's `recent`; float32 (tokens, query "
          "heads, head_dim).");
}

void bind_score_policy(nb::module_& module) {
  nb::class_<ScorePolicy>(
      module, "ScorePolicy",
      "An eviction policy that is a function of Python, for LLM, Cache, `press` and "
      "`evaluate`.")
      .def(
          "__init__",
          [](ScorePolicy* self, const nb::object& function, const nb::object& evict_ratio,
             const nb::object& keep_tokens, const nb::object& threshold, const nb::object& window,
             const nb::object& sink, const nb::object& recent, const nb::object& by_token,
             const nb::object& name) {
            new (self) ScorePolicy(score_policy(function, name, evict_ratio, keep_tokens, threshold,
                                                window, sink, recent, by_token));
          },
          nb::arg("function").none(), nb::kw_only(), nb::arg("evict_ratio") = nb::none(),
          nb::arg("keep_tokens") = nb::none(), nb::arg("threshold") = nb::none(),
          nb::arg("window").none() = 128, nb::arg("sink").none() = 0, nb::arg("recent").none() = 0,
          nb::arg("by_token").none() = false, nb::arg("name") = nb::none(),
          nb::sig(
              "def __init__(self, function: collections.abc.Callable[[PolicyLayer, int], object], "
              "*, evict_ratio: "
              "float | None = None, keep_tokens: int | None = None, threshold: float | None = "
              "None, window: int = 128, sink: int = 0, recent: int = 0, by_token: bool = False, "
              "name: str | None = None) -> None"),
          "function: called as function(layer: PolicyLayer, head: int) after a layer's attention; "
          "returns the scores of the head's rows, an array (rows). Higher scores stay; NaN and "
          "infinite ones do, too.\n"
          "evict_ratio: share of all pairs, in [0, 1). keep_tokens: rows of each head. threshold: "
          "score below which a pair is evicted. Exactly one of the three (ValueError); a value "
          "out of range raises kvzap.PruningError.\n"
          "window, sink: newest and first tokens that a threshold never evicts.\n"
          "recent: newest queries that the function reads, 0 or more; at most those of the model's "
          "longest context.\n"
          "by_token: a row's score depends on the row alone and never changes. `threshold` "
          "needs it.\n"
          "name: in the results of `evaluate`, python:NAME; None: the function's own. A given name "
          "also stands for a function that `evaluate` cannot tell from others.\n"
          "A snapshot does not record the function: resume with the same one, which kvzap does not "
          "check.")
      .def_prop_ro(
          "name", [](const ScorePolicy& policy) { return policy.name; },
          "Its name in the results of `evaluate`.")
      .def_prop_ro("function", [](const ScorePolicy& policy) { return *policy.function; })
      .def_prop_ro("_kind",
                   [](const ScorePolicy& policy) {
                     return nb::make_tuple(policy.recent, policy.info->judges_tokens);
                   })
      .def_ro("_is_named", &ScorePolicy::is_named)
      .def("__reduce__", &reduced)
      .def_prop_ro("window", [](const ScorePolicy& policy) { return policy.pruning.window; })
      .def_prop_ro("sink", [](const ScorePolicy& policy) { return policy.pruning.sink; })
      .def("__str__", [](const ScorePolicy& policy) { return policy.pruning.text(); })
      .def("__repr__", [](const ScorePolicy& policy) {
        return "<kvzap.ScorePolicy " + policy.name + ", " + policy.pruning.text() + ">";
      });
}

}  // namespace

std::shared_ptr<const PolicyInfo> named(const ScorePolicy& policy, const std::string& name) {
  PolicyInfo info = *policy.info;
  info.name = name;
  return std::make_shared<const PolicyInfo>(std::move(info));
}

void bind_policy(nb::module_& module) {
  bind_layer(module);
  bind_score_policy(module);
  module.def("add_policy", &add_policy, nb::arg("function").none(), nb::arg("name") = nb::none(),
             nb::kw_only(), nb::arg("recent").none() = 0, nb::arg("by_token").none() = false,
             nb::sig("def add_policy(function: collections.abc.Callable[[PolicyLayer, int], "
                     "object], name: str | None = None, *, recent: int = 0, by_token: bool = "
                     "False) -> str"),
             "Gives a function a name that texts of policies take in this process, in LLM, Cache, "
             "`press` and `serve` and in requests to it: "
             "LLM(model, \"value_norm@evict-ratio=0.5@decode-every=128\").\n"
             "function, recent, by_token: as of `ScorePolicy`.\n"
             "name: letters, digits, _ and -, which is not the first; None: the function's own.\n"
             "Returns the name. A later call with the same name replaces the function for models "
             "and requests that follow. Raises kvzap.Error for the name of another policy, and "
             "unless recent and by_token are those of before.");
  module.def("_added_policies", [] {
    const std::lock_guard<std::mutex> guard(named_functions_mutex());
    nb::list names;
    for (const auto& [name, named] : named_functions()) names.append(name);
    return names;
  });
}

}  // namespace kvzap::python
