#include "commands/lab/bench_report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "commands/run/report.hpp"
#include "files/json_file.hpp"

namespace kvzap::driver {
namespace {

using nlohmann::ordered_json;

double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

/// Standard deviation of a sample, as in llama-bench; 0 for one value.
double standard_deviation(const std::vector<double>& values) {
  if (values.size() < 2) return 0;
  const double center = mean(values);
  double sum = 0;
  for (const double value : values) sum += (value - center) * (value - center);
  return std::sqrt(sum / static_cast<double>(values.size() - 1));
}

/// Formats a count: "4.41 M", "8.19 B".
std::string human_count(std::int64_t count) {
  constexpr const char* units[] = {"", " K", " M", " B", " T"};
  double value = static_cast<double>(count);
  int unit = 0;
  while (value >= 999.995 && unit < 4) {
    value /= 1000;
    ++unit;
  }
  return unit == 0 ? fmt::format("{}", count) : fmt::format("{:.2f}{}", value, units[unit]);
}

const char* prefill_name(const BenchTest& test) { return test.is_sparse ? "sparse" : "dense"; }

class Markdown final : public BenchTable {
 public:
  Markdown(const BenchOptions& options, const BenchSystem& system,
           const std::vector<BenchTest>& tests) {
    std::string model = system.model;
    if (system.layers < system.all_layers) {
      model += fmt::format(" {}/{} layers", system.layers, system.all_layers);
    }
    const auto any = [&](const auto& is) { return std::any_of(tests.begin(), tests.end(), is); };
    const auto same = [](const std::string& text) {
      return [text](const BenchResult&) { return text; };
    };
    add("model", "model", false, model.size(), same(model));
    add("size", "size", true, 8, same(human_bytes(system.weight_bytes)));
    add("params", "params", true, 8, same(human_count(system.parameters)));
    const std::string backend =
        fmt::format("{} {}", system.machine.backend, system.machine.concurrency);
    add("backend", "backend", false, backend.size(), same(backend));
    add("simd", "simd", false, system.machine.simd.size(), same(system.machine.simd));
    add("ranks", "ranks", true, 0, same(fmt::format("{}", system.ranks)));
    add("dtype", "dtype", false, 0, same(options.dtype));
    add("test", "test", true, 7, [](const BenchResult& r) { return r.test.name(); });
    add("depth", "depth", true, 6,
        [](const BenchResult& r) { return fmt::format("{}", r.test.depth); });
    add("batch", "batch", true, 0,
        [](const BenchResult& r) { return fmt::format("{}", r.test.batch); });
    add("evict-ratio", "evict ratio", true, 0, [](const BenchResult& r) {
      return r.test.evict_ratio ? fmt::format("{}", *r.test.evict_ratio) : "-";
    });
    add("skew", "skew", true, 0,
        [](const BenchResult& r) { return fmt::format("{}", r.test.skew); });
    add("evicted", "evicted", true, 0,
        [](const BenchResult& r) { return fmt::format("{:.1f} %", 100 * r.evicted()); });
    add("t/s", "t/s", true, 19, [](const BenchResult& r) {
      const auto samples = r.tokens_per_second();
      return fmt::format("{:.2f} ± {:.2f}", mean(samples), standard_deviation(samples));
    });
    add("ms/token", "ms/token", true, 9,
        [](const BenchResult& r) { return fmt::format("{:.3f}", r.ms_per_token()); });
    add("kv-live", "KV live", true, 8,
        [](const BenchResult& r) { return human_bytes(r.kv_live_bytes); });
    add("kv-allocated", "KV allocated", true, 0,
        [](const BenchResult& r) { return human_bytes(r.kv_allocated_bytes); });
    add("peak-rss", "peak RSS", true, 8,
        [](const BenchResult& r) { return human_bytes(r.peak_rss_bytes); });
    add("calls", "calls", true, 0,
        [](const BenchResult& r) { return fmt::format("{:.0f}", r.calls); });
    add("call-bytes", "call bytes", true, 0,
        [](const BenchResult& r) { return human_bytes(static_cast<std::int64_t>(r.call_bytes)); });
    add("call-ms", "call ms", true, 0,
        [](const BenchResult& r) { return fmt::format("{:.3f}", 1e3 * r.call_seconds); });

    const std::vector<std::string> given = columns_of(options);
    if (!given.empty()) {
      take(given);
      return;
    }
    // Columns that always identify a test come first. The others follow in order of use while the
    // line has space for them.
    std::vector<std::string> wanted = {"test", "t/s", "depth"};
    if (any([](const auto& test) { return test.batch != 1; })) wanted.emplace_back("batch");
    if (any([](const auto& test) { return test.evict_ratio.value_or(0) != 0; })) {
      wanted.emplace_back("evict-ratio");
    }
    if (any([](const auto& test) { return test.skew != 1; })) wanted.emplace_back("skew");
    for (const char* name : {"evicted", "kv-live", "model", "ms/token", "peak-rss", "ranks", "simd",
                             "dtype", "kv-allocated", "backend", "size", "params"}) {
      wanted.emplace_back(name);
    }
    take_what_fits(wanted);
  }

  std::string header() override {
    std::string names = "|", rules = "|";
    for (const Column& column : m_columns) {
      names += " " + padded(column, column.name) + " |";
      rules += " " + std::string(column.width - column.right, '-') + (column.right ? ": |" : " |");
    }
    return names + "\n" + rules + "\n";
  }

  std::string row(const BenchResult& result) override {
    std::string text = "|";
    for (const Column& column : m_columns) text += " " + padded(column, column.cell(result)) + " |";
    return text + "\n";
  }

 private:
  static constexpr std::size_t most_characters = 120;

  struct Column {
    std::string id;  // name in --columns
    std::string name;
    bool right;
    std::size_t width;
    std::function<std::string(const BenchResult&)> cell;
  };

  /// Keeps these columns, in this order.
  void take(const std::vector<std::string>& ids) {
    std::vector<Column> taken;
    taken.reserve(ids.size());
    for (const std::string& id : ids) {
      taken.push_back(*std::find_if(m_columns.begin(), m_columns.end(),
                                    [&](const Column& column) { return column.id == id; }));
    }
    m_columns = std::move(taken);
  }

  /// Keeps as many of these columns as fit on a line, in their default order. Columns at the front
  /// of the list are kept first.
  void take_what_fits(const std::vector<std::string>& wanted) {
    std::size_t left = most_characters - 1;  // a bar at the end
    std::vector<std::string> ids;
    for (const std::string& id : wanted) {
      const auto column = std::find_if(m_columns.begin(), m_columns.end(),
                                       [&](const Column& one) { return one.id == id; });
      constexpr std::size_t between = 3;  // a bar and two blanks
      if (column->width + between > left) continue;
      left -= column->width + between;
      ids.push_back(id);
    }
    m_columns.erase(std::remove_if(m_columns.begin(), m_columns.end(),
                                   [&](const Column& column) {
                                     return std::find(ids.begin(), ids.end(), column.id) ==
                                            ids.end();
                                   }),
                    m_columns.end());
  }

  void add(const std::string& id, const std::string& name, bool right, std::size_t width,
           std::function<std::string(const BenchResult&)> cell) {
    m_columns.push_back({id, name, right, std::max(width, name.size()), std::move(cell)});
  }

  static std::string padded(const Column& column, const std::string& text) {
    // Counts characters, not bytes: ± has two bytes.
    const auto length =
        static_cast<std::size_t>(std::count_if(text.begin(), text.end(), [](char c) {
          return (static_cast<unsigned char>(c) >> 6) != 2;
        }));
    const std::string blanks(column.width - std::min(column.width, length), ' ');
    return column.right ? blanks + text : text + blanks;
  }

  std::vector<Column> m_columns;
};

class Csv final : public BenchTable {
 public:
  Csv(const BenchOptions& options, const BenchSystem& system)
      : m_options(options), m_system(system) {}

  std::string header() override {
    return "version,revision,model,layers,weight_bytes,parameters,backend,concurrency,simd,ranks,"
           "dtype,kv_type,"
           "test,n_prompt,n_gen,depth,batch,evict_ratio,skew,threshold,evicted,prune,prefill,chunk,"
           "window,page_rows,read_pages,repetitions,tokens_per_second,tokens_per_second_stddev,ms_"
           "per_token,"
           "kv_live_bytes,kv_allocated_bytes,peak_rss_bytes,calls_per_step,call_bytes_per_step,"
           "call_seconds_per_step\n";
  }

  std::string row(const BenchResult& r) override {
    const BenchTest& test = r.test;
    const bool is_prefill = test.kind == BenchTest::Kind::prefill;
    const auto samples = r.tokens_per_second();
    const std::vector<std::string> cells = {
        quoted(m_system.version),
        quoted(m_system.revision),
        quoted(m_system.model),
        fmt::format("{}", m_system.layers),
        fmt::format("{}", m_system.weight_bytes),
        fmt::format("{}", m_system.parameters),
        quoted(m_system.machine.backend),
        fmt::format("{}", m_system.machine.concurrency),
        quoted(m_system.machine.simd),
        fmt::format("{}", m_system.ranks),
        quoted(m_options.dtype),
        quoted(kv_type_name(m_options.kv_type, m_options.dtype)),
        quoted(test.name()),
        fmt::format("{}", is_prefill ? test.tokens : 0),
        fmt::format("{}", is_prefill ? 0 : test.tokens),
        fmt::format("{}", test.depth),
        fmt::format("{}", test.batch),
        test.evict_ratio ? fmt::format("{}", *test.evict_ratio) : "",
        test.evict_ratio ? fmt::format("{}", test.skew) : "",
        m_options.threshold ? fmt::format("{}", *m_options.threshold) : "",
        fmt::format("{:.6f}", r.evicted()),
        quoted(test.is_pruned() ? m_options.prune : "none"),
        quoted(prefill_name(test)),
        fmt::format("{}", m_options.chunk),
        fmt::format("{}", m_options.window),
        fmt::format("{}", m_options.page_rows),
        quoted(m_options.read_pages),
        fmt::format("{}", m_options.repetitions),
        fmt::format("{:.6g}", mean(samples)),
        fmt::format("{:.6g}", standard_deviation(samples)),
        fmt::format("{:.6g}", r.ms_per_token()),
        fmt::format("{}", r.kv_live_bytes),
        fmt::format("{}", r.kv_allocated_bytes),
        fmt::format("{}", r.peak_rss_bytes),
        fmt::format("{:.6g}", r.calls),
        fmt::format("{:.6g}", r.call_bytes),
        fmt::format("{:.6g}", r.call_seconds)};
    std::string line;
    for (const std::string& cell : cells) line += (line.empty() ? "" : ",") + cell;
    return line + "\n";
  }

 private:
  static std::string quoted(const std::string& text) {
    std::string cell = "\"";
    for (const char c : text) cell += c == '"' ? "\"\"" : std::string(1, c);
    return cell + "\"";
  }

  const BenchOptions& m_options;
  const BenchSystem& m_system;
};

class Json final : public BenchTable {
 public:
  Json(const BenchOptions& options, const BenchSystem& system)
      : m_options(options), m_system(system) {}

  std::string header() override { return ""; }

  std::string row(const BenchResult& r) override {
    const BenchTest& test = r.test;
    const bool is_prefill = test.kind == BenchTest::Kind::prefill;
    const auto samples = r.tokens_per_second();
    ordered_json row = {{"test", test.name()},
                        {"n_prompt", is_prefill ? test.tokens : 0},
                        {"n_gen", is_prefill ? 0 : test.tokens},
                        {"depth", test.depth},
                        {"batch", test.batch},
                        {"prune", test.is_pruned() ? m_options.prune : "none"},
                        {"prefill", prefill_name(test)}};
    if (test.evict_ratio) {
      row["evict_ratio"] = *test.evict_ratio;
      row["skew"] = test.skew;
    }
    row["evicted"] = r.evicted();
    row["kept_rows"] = r.kept_rows;
    row["full_rows"] = r.full_rows;
    row["tokens_per_second"] = mean(samples);
    row["tokens_per_second_stddev"] = standard_deviation(samples);
    row["ms_per_token"] = r.ms_per_token();
    row["kv_live_bytes"] = r.kv_live_bytes;
    row["kv_allocated_bytes"] = r.kv_allocated_bytes;
    row["peak_rss_bytes"] = r.peak_rss_bytes;
    row["calls_per_step"] = r.calls;
    row["call_bytes_per_step"] = r.call_bytes;
    row["call_seconds_per_step"] = r.call_seconds;
    row["samples_seconds"] = r.seconds;
    row["samples_tokens_per_second"] = samples;
    m_rows.push_back(std::move(row));
    return "";
  }

  std::string footer() override {
    ordered_json json = {{"format", "kvzap.bench"},
                         {"format_version", 1},
                         {"version", m_system.version},
                         {"revision", m_system.revision}};
    json["model"] = {{"name", m_system.model},
                     {"path", m_options.model},
                     {"layers", m_system.layers},
                     {"all_layers", m_system.all_layers},
                     {"parameters", m_system.parameters},
                     {"weight_bytes", m_system.weight_bytes}};
    if (m_options.random_weights) json["model"]["random_weights"] = *m_options.random_weights;
    if (!m_options.rope.scaling.empty()) {
      json["model"]["rope_scaling"] = {{"type", m_options.rope.scaling}};
      if (m_options.rope.scale) json["model"]["rope_scaling"]["factor"] = *m_options.rope.scale;
    }
    if (!m_system.surrogate_kind.empty()) {
      json["surrogate"] = {{"path", m_options.surrogate}, {"kind", m_system.surrogate_kind}};
      // JSON has no infinity.
      const double threshold = *m_options.threshold;
      if (std::isfinite(threshold)) {
        json["surrogate"]["threshold"] = threshold;
      } else {
        json["surrogate"]["threshold"] = threshold > 0 ? "inf" : "-inf";
      }
    }
    json["system"] = system_json(m_system.machine, m_system.ranks);
    json["options"] = {{"dtype", m_options.dtype},
                       {"kv_type", kv_type_name(m_options.kv_type, m_options.dtype)},
                       {"weights", m_options.weights},
                       {"window", m_options.window},
                       {"page_rows", m_options.page_rows},
                       {"read_pages", m_options.read_pages},
                       {"balance", m_options.balance},
                       {"chunk", m_options.chunk},
                       {"repetitions", m_options.repetitions},
                       {"warmup", m_options.warmup},
                       {"seed", m_options.seed}};
    json["results"] = m_rows;
    return files::json_lines(json);
  }

 private:
  const BenchOptions& m_options;
  const BenchSystem& m_system;
  ordered_json m_rows = ordered_json::array();
};

}  // namespace

double BenchResult::evicted() const {
  return full_rows == 0 ? 0 : 1 - static_cast<double>(kept_rows) / static_cast<double>(full_rows);
}

std::vector<double> BenchResult::tokens_per_second() const {
  std::vector<double> rates;
  for (const double s : seconds) {
    rates.push_back(static_cast<double>(test.tokens) * test.batch / std::max(s, 1e-9));
  }
  return rates;
}

double BenchResult::ms_per_token() const {
  return 1e3 * mean(seconds) / static_cast<double>(test.tokens);
}

std::unique_ptr<BenchTable> BenchTable::create(const BenchOptions& options,
                                               const BenchSystem& system,
                                               const std::vector<BenchTest>& tests) {
  if (options.output == "csv") return std::make_unique<Csv>(options, system);
  if (options.output == "json") return std::make_unique<Json>(options, system);
  return std::make_unique<Markdown>(options, system, tests);
}

}  // namespace kvzap::driver
