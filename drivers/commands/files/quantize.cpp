#include "commands/files/quantize.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string_view>
#include <vector>

#include "base/stopwatch.hpp"
#include "commands/files/convert.hpp"
#include "commands/run/report.hpp"
#include "commands/support/setup.hpp"
#include "console/signals.hpp"
#include "files/json_file.hpp"
#include "model/quantise_model.hpp"
#include "options/options.hpp"

namespace kvzap::driver {

namespace {

using model::QuantiseReport;
using model::WrittenTensor;

std::vector<std::string> type_names() {
  std::vector<std::string> names;
  for (const gguf::TypeMixture& mixture : gguf::type_mixtures()) names.emplace_back(mixture.name);
  return names;
}

/// Sizes and errors of a whole file.
struct Totals {
  std::int64_t values = 0;
  std::int64_t bytes = 0;
  double mean_error = 0;                 // over the tensors with blocks
  const WrittenTensor* worst = nullptr;  // nullptr if there is none
  std::map<std::string_view, int> types;

  double bits_per_weight() const {
    return values == 0 ? 0 : 8 * static_cast<double>(bytes) / static_cast<double>(values);
  }
};

Totals totals_of(const QuantiseReport& report) {
  Totals totals;
  int n_blocks = 0;
  for (const WrittenTensor& tensor : report.tensors) {
    totals.values += tensor.values;
    totals.bytes += tensor.bytes;
    ++totals.types[tensor.type];
    if (!tensor.has_blocks) continue;
    ++n_blocks;
    totals.mean_error += tensor.relative_error;
    if (totals.worst == nullptr || tensor.relative_error > totals.worst->relative_error) {
      totals.worst = &tensor;
    }
  }
  if (n_blocks > 0) totals.mean_error /= n_blocks;
  return totals;
}

std::string text_of(const QuantizeOptions& options, const QuantiseReport& report, double seconds) {
  const Totals totals = totals_of(report);
  std::string types;
  for (const auto& [name, count] : totals.types) {
    types += fmt::format("{}{} {}", types.empty() ? "" : ", ", name, count);
  }
  std::string text = fmt::format(
      "{}: {}, was {}; {:.2f} bits a weight; {:.1f} s\n"
      "tensors: {}\n",
      options.output, human_bytes(static_cast<std::int64_t>(report.bytes_after)),
      human_bytes(static_cast<std::int64_t>(report.bytes_before)), totals.bits_per_weight(),
      seconds, types);
  if (totals.worst != nullptr) {
    text +=
        fmt::format("relative RMS error: mean {:.5f}, largest {:.5f} ({}, {})\n", totals.mean_error,
                    totals.worst->relative_error, totals.worst->name, totals.worst->type);
  }
  return text;
}

std::string json_of(const QuantizeOptions& options, std::string_view type,
                    const QuantiseReport& report, double seconds) {
  using nlohmann::ordered_json;
  const Totals totals = totals_of(report);
  ordered_json json = {{"format", "kvzap.quantize"}, {"format_version", 1}};
  json["model"] = options.model;
  json["output"] = options.output;
  json["type"] = type;
  json["bytes_before"] = report.bytes_before;
  json["bytes_after"] = report.bytes_after;
  json["weights"] = totals.values;
  json["bits_per_weight"] = totals.bits_per_weight();
  json["mean_relative_error"] = totals.mean_error;
  json["largest_relative_error"] = totals.worst == nullptr ? 0 : totals.worst->relative_error;
  json["worst_tensor"] =
      totals.worst == nullptr ? ordered_json() : ordered_json(totals.worst->name);
  json["seconds"] = seconds;
  json["tensors"] = ordered_json::array();
  for (const WrittenTensor& tensor : report.tensors) {
    json["tensors"].push_back({{"name", tensor.name},
                               {"type", tensor.type},
                               {"values", tensor.values},
                               {"bytes", tensor.bytes},
                               {"relative_error", tensor.relative_error}});
  }
  return files::json_lines(json);
}

}  // namespace

void check_options(const QuantizeOptions& o) {
  require(!o.model.empty(), "no model: give a Hugging Face folder or a GGUF file with -m");
  require(!o.output.empty(), "no output: give a new GGUF file with -o");
  require(std::filesystem::path(o.output).extension() == ".gguf",
          fmt::format("-o {}: expected a name that ends in .gguf", o.output));
}

void declare(CLI::App& app, QuantizeOptions& o) {
  const std::string input = "Model", output = "Output";
  app.add_option("-m,--model", o.model, "Hugging Face folder or GGUF file to read; required")
      ->type_name("MODEL")
      ->group(input);
  app.add_option(
         "--type", o.type,
         "type of the weights, by llama.cpp's names; _M gives more of the sensitive tensors a "
         "larger type than _S does")
      ->capture_default_str()
      ->check(CLI::IsMember(type_names(), CLI::ignore_case))
      ->group(input);
  declare_threads(app, o.threads, input);
  app.add_option("-o,--output", o.output, "new GGUF file (NAME.gguf); required")
      ->type_name("FILE")
      ->group(output);
  app.add_option("--json", o.json,
                 "write sizes and errors of all tensors to this file; - is standard output")
      ->type_name("FILE")
      ->group(output);
  declare_progress(app, o.progress, output);
  app.add_flag("-q,--quiet", o.quiet, "print no progress and no summary")->group(output);
}

int quantize(const QuantizeOptions& options, const Communicator& comm) {
  use_threads(options.threads, comm, comm.is_root() && !options.quiet);
  return write_model(options.model, options.output, options.quiet, comm, [&] {
    check_writable(options.json);
    const gguf::TypeMixture& mixture = *gguf::find_type_mixture(options.type);
    Progress bar(!options.quiet, options.progress);
    const auto start = base::Clock::now();
    const QuantiseReport report = model::quantise_model(options.model, options.output, mixture,
                                                        [&](std::int64_t done, std::int64_t total) {
                                                          bar.update("quantizing", done, total);
                                                          stop_here_if_asked();
                                                        });
    const double seconds = base::seconds_since(start);
    bar.clear();
    say_warnings(report.warnings);
    if (!options.json.empty()) {
      write_whole(options.json, json_of(options, mixture.name, report, seconds));
    }
    if (!options.quiet && options.json != "-") {
      write_whole("-", text_of(options, report, seconds));
    }
    flush_stdout();
  });
}

}  // namespace kvzap::driver
