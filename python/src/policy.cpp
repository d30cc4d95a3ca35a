// Eviction policies that are functions of Python.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <Kokkos_Core.hpp>
#include <kvzap/engine/policies.hpp>
#include <kvzap/engine/policy.hpp>
#include <kvzap/engine/pruning.hpp>
#include <memory>
#include <string>
#include <utility>

#include "arrays.hpp"
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
  explicit Layer(PolicyLayer& layer) : m_layer(&layer) {}

  void end() { m_layer = nullptr; }
  PolicyLayer& operator*() const {
    if (m_layer == nullptr) throw Error("the layer exists during the call of the policy alone");
    return *m_layer;
  }
  PolicyLayer& of(int head) const {
    PolicyLayer& layer = **this;
    require_index("head", head, layer.heads());
    return layer;
  }

 private:
  PolicyLayer* m_layer;
};

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
    with_interpreter([&] {
      const nb::object seen = nb::cast(Layer(layer));
      const auto end = [&] { nb::cast<Layer&>(seen).end(); };
      try {
        for (int head = 0; head < layer.heads(); ++head) call(seen, layer, head, host);
      } catch (...) {
        end();
        throw;
      }
      end();
    });
    Kokkos::deep_copy(layer.exec(), scores, host);
    layer.exec().fence();
  }

 private:
  using Scores = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

  template <class Host>
  void call(const nb::object& seen, PolicyLayer& layer, int head, const Host& host) const {
    const nb::object result = (*m_function)(seen, head);
    // Of any type that NumPy makes an array of.
    const nb::object array = nb::module_::import_("numpy").attr("ascontiguousarray")(
        result, nb::arg("dtype") = "float32");
    Scores scores;
    const bool is_right = nb::try_cast(array, scores) &&
                          static_cast<std::int64_t>(scores.shape(0)) == layer.rows(head);
    if (!is_right) {
      const std::string shape = nb::repr(array.attr("shape")).c_str();
      throw nb::value_error(("scores of the policy " + m_name + ": expected shape (" +
                             std::to_string(layer.rows(head)) + ",), found " + shape)
                                .c_str());
    }
    for (std::size_t row = 0; row < scores.shape(0); ++row) host(head, row) = scores(row);
  }

  std::shared_ptr<nb::object> m_function;
  std::string m_name;
  std::int64_t m_recent;
};

/// Returns the letters, digits and underscores of a text.
std::string name_of_text(const std::string& text) {
  std::string name;
  for (const char c : text) {
    const bool stays = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    if (stays || c == '_') name += c;
  }
  return name.empty() ? "function" : name;
}

/// Returns the name that a user has given, or the function's.
std::string name_of(const nb::callable& function, const nb::object& given) {
  if (!given.is_none()) {
    const auto name = as<std::string>(given, "name", "letters, digits and underscores");
    if (name == name_of_text(name)) return name;
    throw nb::value_error(
        ("name is \"" + name + "\"; expected letters, digits and underscores").c_str());
  }
  const nb::handle owner =
      nb::hasattr(function, "__name__") ? nb::handle(function) : function.type();
  return name_of_text(as<std::string>(owner.attr("__name__"), "function", "a name"));
}

ScorePolicy score_policy(const nb::callable& function, const nb::object& name,
                         std::optional<double> evict_ratio, std::optional<std::int64_t> keep_tokens,
                         std::optional<double> threshold, int window, std::int64_t sink,
                         std::int64_t recent, bool by_token) {
  if (evict_ratio.has_value() + keep_tokens.has_value() + threshold.has_value() != 1) {
    throw nb::value_error("expected one of evict_ratio, keep_tokens and threshold");
  }
  ScorePolicy policy;
  policy.name = name_of(function, name);
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
  policy.pruning.policy = policy.info->name;
  policy.pruning.window = window;
  policy.pruning.sink = sink;
  if (evict_ratio) policy.pruning.evict_ratio(*evict_ratio);
  if (keep_tokens) policy.pruning.keep_tokens(*keep_tokens);
  if (threshold) policy.pruning.threshold(*threshold);
  PolicyChoice choice;
  choice.info = policy.info.get();
  choice.budget = policy.pruning.budget();
  choice.threshold = threshold.value_or(0);
  check(LoadedPruning{policy.pruning, std::make_shared<PolicyChoice>(std::move(choice))}, false);
  return policy;
}

}  // namespace

void bind_policy(nb::module_& module) {
  // A function of a head that copies what `view` returns.
  const auto rows_of = [](auto view) {
    return [view](const Layer& layer, int head) {
      PolicyLayer& own = layer.of(head);
      return copied(own.exec(), view(own, head));
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
          "rows", [](const Layer& layer, int head) { return layer.of(head).rows(head); },
          nb::arg("head"))
      .def("positions", rows_of([](PolicyLayer& layer, int head) { return layer.positions(head); }),
           nb::arg("head"), "Positions of the rows; int64 (rows).")
      .def("keys", rows_of([](PolicyLayer& layer, int head) { return layer.keys(head); }),
           nb::arg("head"), "Keys after RoPE; float32 (rows, head_dim).")
      .def("values", rows_of([](PolicyLayer& layer, int head) { return layer.values(head); }),
           nb::arg("head"), "Values; float32 (rows, head_dim).")
      .def(
          "recent_queries",
          [](const Layer& layer) { return copied((*layer).exec(), (*layer).recent().queries); },
          "The newest queries after RoPE, as many as the policy's `recent`; float32 (tokens, query "
          "heads, head_dim).");
  nb::class_<ScorePolicy>(
      module, "ScorePolicy",
      "An eviction policy that is a function of Python, for LLM, Cache, `press` and "
      "`evaluate`.")
      .def(
          "__init__",
          [](ScorePolicy* self, const nb::callable& function, std::optional<double> evict_ratio,
             std::optional<std::int64_t> keep_tokens, std::optional<double> threshold, int window,
             std::int64_t sink, std::int64_t recent, bool by_token, const nb::object& name) {
            new (self) ScorePolicy(score_policy(function, name, evict_ratio, keep_tokens, threshold,
                                                window, sink, recent, by_token));
          },
          nb::arg("function"), nb::kw_only(), nb::arg("evict_ratio") = nb::none(),
          nb::arg("keep_tokens") = nb::none(), nb::arg("threshold") = nb::none(),
          nb::arg("window") = 128, nb::arg("sink") = 0, nb::arg("recent") = 0,
          nb::arg("by_token") = false, nb::arg("name") = nb::none(),
          "function: called as function(layer: PolicyLayer, head: int) after a layer's attention; "
          "returns the scores of the head's rows, an array (rows). Higher scores stay; NaN and "
          "infinite ones do, too.\n"
          "evict_ratio: share of all pairs, in [0, 1). keep_tokens: rows of each head. threshold: "
          "score below which a pair is evicted. Exactly one of the three (ValueError); a value "
          "out of range raises kvzap.PruningError.\n"
          "window, sink: newest and first tokens that a threshold never evicts.\n"
          "recent: newest queries that the function reads.\n"
          "by_token: a row's score depends on the row alone and never changes. `threshold` "
          "needs it.\n"
          "name: in the results of `evaluate`, python:NAME; None: the function's own.\n"
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
      .def_prop_ro("window", [](const ScorePolicy& policy) { return policy.pruning.window; })
      .def_prop_ro("sink", [](const ScorePolicy& policy) { return policy.pruning.sink; })
      .def("__str__", [](const ScorePolicy& policy) { return policy.pruning.text(); })
      .def("__repr__", [](const ScorePolicy& policy) {
        return "<kvzap.ScorePolicy " + policy.name + ", " + policy.pruning.text() + ">";
      });
}

}  // namespace kvzap::python
