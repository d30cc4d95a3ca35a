#include <nanobind/nanobind.h>
#include <nanobind/operators.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <filesystem>
#include <kvzap/engine/pruning.hpp>
#include <utility>

#include "llm.hpp"
#include "policy/check_names.hpp"

namespace kvzap::python {
namespace {

void set_amount(Pruning& pruning, const nb::object& threshold, std::optional<double> evict_ratio,
                std::optional<std::int64_t> keep_tokens) {
  if (nb::isinstance<nb::str>(threshold)) {
    if (as<std::string>(threshold, "threshold", "a number or \"auto\"") != "auto") {
      throw nb::value_error("threshold: expected a number or \"auto\"");
    }
    pruning.recommended_threshold();
  } else if (!threshold.is_none()) {
    pruning.threshold(as<double>(threshold, "threshold", "a number or \"auto\""));
  }
  if (evict_ratio) pruning.evict_ratio(*evict_ratio);
  if (keep_tokens) pruning.keep_tokens(*keep_tokens);
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
          [](const std::filesystem::path& surrogate, const nb::object& threshold,
             std::optional<double> evict_ratio, int window) {
            Pruning pruning = Pruning::kvzap(surrogate.string());
            pruning.window = window;
            set_amount(pruning, threshold, evict_ratio, std::nullopt);
            return checked(std::move(pruning));
          },
          nb::arg("surrogate"), nb::kw_only(), nb::arg("threshold") = nb::none(),
          nb::arg("evict_ratio") = nb::none(), nb::arg("window") = 128,
          "KVzap (arXiv 2601.07891) with the surrogate in this folder.\n\n"
          "threshold: log score below which pairs are evicted, or \"auto\" for the one that "
          "`kvzap calibrate --evaluation` recommends.\n"
          "evict_ratio: looks a threshold up in the surrogate's thresholds.json.\n"
          "window: most recent tokens, which always stay.")
      .def_static(
          "policy",
          [](const nb::str& name, std::optional<double> evict_ratio,
             std::optional<std::int64_t> keep_tokens, const nb::object& threshold) {
            Pruning pruning = Pruning::parse(text_of(name, "name"));
            set_amount(pruning, threshold, evict_ratio, keep_tokens);
            return checked(std::move(pruning));
          },
          nb::arg("name"), nb::kw_only(), nb::arg("evict_ratio") = nb::none(),
          nb::arg("keep_tokens") = nb::none(), nb::arg("threshold") = nb::none(),
          "Any policy of kvzap (`kvzap policies` lists them), such as \"snapkv:window=32+ada\".\n\n"
          "evict_ratio: share of all pairs, in [0, 1). keep_tokens: rows of each head.\n"
          "Raises kvzap.Error for an unknown policy, parameter or setting, with the nearest known "
          "name, and kvzap.PruningError for a value out of range. `LLM` and `Cache` check the "
          "rest, "
          "files included.")
      .def_static("none", &Pruning::none, "The full cache.")
      .def_static(
          "parse",
          [](const nb::str& text) { return checked(Pruning::parse(text_of(text, "text"))); },
          nb::arg("text"),
          "The text form: a policy and settings, such as \"snapkv@evict-ratio=0.5\". Raises "
          "kvzap.Error as `policy` does.")
      .def("_check", [](const Pruning& pruning) { check(pruning); })
      .def_prop_ro("prunes", &Pruning::prunes)
      .def_ro("window", &Pruning::window)
      .def_ro("sink", &Pruning::sink)
      .def("__str__", &Pruning::text)
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
