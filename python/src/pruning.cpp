#include <nanobind/nanobind.h>
#include <nanobind/operators.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>

#include <filesystem>
#include <kvzap/engine/pruning.hpp>
#include <string>
#include <utility>
#include <variant>

#include "llm.hpp"
#include "policy/check_names.hpp"

namespace kvzap::python {
namespace {

void set_amount(Pruning& pruning, const nb::object& threshold, const nb::object& evict_ratio,
                const nb::object& keep_tokens) {
  const std::pair<const nb::object*, PruningField> given[] = {
      {&threshold, PruningField::threshold},
      {&evict_ratio, PruningField::evict_ratio},
      {&keep_tokens, PruningField::keep_tokens}};
  std::string other = pruning.amount == Pruning::Amount() ? "" : pruning.text();
  for (const auto& [value, field] : given) {
    if (value->is_none()) continue;
    const std::string name(name_of(field));
    if (!other.empty()) {
      other.insert(0, "both ").append(" and ").append(name);
      throw PruningError({PruningFault::Code::several_amounts,
                          {field},
                          other + " give an amount; expected one of them"});
    }
    other = name;
  }
  if (nb::isinstance<nb::str>(threshold)) {
    if (as<std::string>(threshold, "threshold", "a number or \"auto\"") != "auto") {
      throw nb::value_error("threshold: expected a number or \"auto\"");
    }
    pruning.recommended_threshold();
  } else if (!threshold.is_none()) {
    pruning.threshold(as<double>(threshold, "threshold", "a number or \"auto\""));
  }
  if (!evict_ratio.is_none()) {
    pruning.evict_ratio(as<double>(evict_ratio, "evict_ratio", "a number"));
  }
  if (!keep_tokens.is_none()) {
    pruning.keep_tokens(as<std::int64_t>(keep_tokens, "keep_tokens", "a whole number"));
  }
}

void set_window(Pruning& pruning, const nb::object& window) {
  constexpr const char* expected = "a whole number of tokens or \"auto\"";
  if (!nb::isinstance<nb::str>(window)) {
    pruning.window = as<int>(window, "window", expected);
    return;
  }
  if (as<std::string>(window, "window", expected) != "auto") {
    throw nb::value_error("window: expected a whole number of tokens or \"auto\"");
  }
  pruning.auto_window = true;
}

/// Returns the pruning. Throws Error for names that are not known and PruningError for values out
/// of range. Other rules and files are checked where a model is known.
Pruning checked(Pruning pruning) {
  policy::check_names(pruning.policy);
  check(LoadedPruning{pruning, nullptr}, /*has_scorer*/ true);
  return pruning;
}

}  // namespace

void bind_pruning(nb::module_& module) {
  nb::class_<Pruning>(module, "Pruning",
                      "How a cache is pruned: policy, amount and moment. A value: it names files "
                      "and loads none.\n\nstr(pruning) is the text that `parse` reads, and that "
                      "kvzap's --policy takes.")
      .def_static(
          "kvzap",
          [](const nb::object& surrogate, const nb::object& threshold,
             const nb::object& evict_ratio, const nb::object& window) {
            const auto folder = as<std::filesystem::path>(surrogate, "surrogate", "a path");
            const nb::object expanded =
                nb::module_::import_("os.path").attr("expanduser")(nb::cast(folder));
            Pruning pruning = Pruning::kvzap(nb::cast<std::filesystem::path>(expanded).string());
            set_window(pruning, window);
            set_amount(pruning, threshold, evict_ratio, nb::none());
            return checked(std::move(pruning));
          },
          nb::arg("surrogate").none(), nb::kw_only(), nb::arg("threshold") = nb::none(),
          nb::arg("evict_ratio") = nb::none(), nb::arg("window").none() = 128,
          nb::sig("def kvzap(surrogate: str | os.PathLike[str], *, threshold: float | str | None = "
                  "None, evict_ratio: float | None = None, window: int | str = 128) -> Pruning"),
          "KVzap (arXiv 2601.07891) with the surrogate in this folder.\n\n"
          "threshold: log score below which pairs are evicted, or \"auto\" for the one that "
          "`kvzap calibrate --evaluation` recommends.\n"
          "evict_ratio: looks a threshold up in the surrogate's thresholds.json.\n"
          "window: most recent tokens, which always stay, or \"auto\" for a window of "
          "thresholds.json: the recommended one, or for evict_ratio the largest that takes at most "
          "a quarter of the rows that stay.")
      .def_static(
          "policy",
          [](const nb::object& name, const nb::object& evict_ratio, const nb::object& keep_tokens,
             const nb::object& threshold) {
            Pruning pruning = Pruning::parse(as<std::string>(name, "name", "a policy's text"));
            set_amount(pruning, threshold, evict_ratio, keep_tokens);
            return checked(std::move(pruning));
          },
          nb::arg("name").none(), nb::kw_only(), nb::arg("evict_ratio") = nb::none(),
          nb::arg("keep_tokens") = nb::none(), nb::arg("threshold") = nb::none(),
          nb::sig("def policy(name: str, *, evict_ratio: float | None = None, keep_tokens: int | "
                  "None = None, threshold: float | str | None = None) -> Pruning"),
          "Any policy of kvzap (`kvzap policies` lists them), such as \"snapkv:window=32+ada\".\n\n"
          "evict_ratio: share of all pairs, in [0, 1). keep_tokens: rows of each head.\n"
          "Raises kvzap.Error for an unknown policy, parameter or setting, with the nearest known "
          "name, and kvzap.PruningError for a value out of range. `LLM` and `Cache` check the "
          "rest, "
          "files included.")
      .def_static("none", &Pruning::none, "The full cache.")
      .def_static(
          "parse",
          [](const nb::object& text) {
            return checked(Pruning::parse(as<std::string>(text, "text", "a policy's text")));
          },
          nb::arg("text").none(), nb::sig("def parse(text: str) -> Pruning"),
          "The text form: a policy and settings, such as \"snapkv@evict-ratio=0.5\". Raises "
          "kvzap.Error as `policy` does.")
      .def("_check", [](const Pruning& pruning) { check(pruning); })
      .def_prop_ro("prunes", &Pruning::prunes)
      .def_prop_ro("window",
                   [](const Pruning& pruning) -> std::variant<int, std::string> {
                     if (pruning.auto_window) return "auto";
                     return pruning.window;
                   })
      .def_ro("sink", &Pruning::sink)
      .def_prop_ro("_sparse_chunk",
                   [](const Pruning& pruning) -> std::optional<std::int64_t> {
                     if (pruning.prefill != PrefillMode::sparse) return std::nullopt;
                     return pruning.chunk;
                   })
      .def("__str__", &Pruning::text)
      .def("__reduce__",
           [](const Pruning& pruning) {  // static functions of nanobind cannot be pickled
             const nb::object parse =
                 nb::module_::import_("operator").attr("methodcaller")("parse", pruning.text());
             return nb::make_tuple(parse, nb::make_tuple(nb::type<Pruning>()));
           })
      .def("__repr__",
           [](const Pruning& pruning) {
             return "kvzap.Pruning.parse(" +
                    nb::cast<std::string>(nb::repr(nb::str(pruning.text().c_str()))) + ")";
           })
      .def("__hash__",
           [](const Pruning& pruning) { return nb::hash(nb::str(pruning.text().c_str())); })
      .def(nb::self == nb::self, nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def(nb::self != nb::self, nb::sig("def __ne__(self, other: object, /) -> bool"));
}

}  // namespace kvzap::python
