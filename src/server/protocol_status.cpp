#include <fmt/format.h>

#include <kvzap/server/protocol.hpp>
#include <nlohmann/json.hpp>

#include "files/json_file.hpp"
#include "files/quote.hpp"

namespace kvzap::server {
namespace {

using OrderedJson = nlohmann::ordered_json;

OrderedJson count_or_null(std::int64_t count) {
  return count > 0 ? OrderedJson(count) : OrderedJson();
}

OrderedJson model_json(const ServedModel& model) {
  OrderedJson one;
  one["id"] = model.name;
  one["object"] = "model";
  one["created"] = model.created;
  one["owned_by"] = "kvzap";
  one["max_model_len"] = count_or_null(model.max_tokens);
  return one;
}

}  // namespace

std::string models_body(const ServedModel& model) {
  return files::json_text({{"object", "list"}, {"data", OrderedJson::array({model_json(model)})}});
}

std::string model_body(const ServedModel& model) { return files::json_text(model_json(model)); }

std::string deleted_body(const std::string& id) {
  return files::json_text({{"id", id}, {"object", "response"}, {"deleted", true}});
}

std::string status_body(const ServedModel& model, const Scheduler& scheduler,
                        std::optional<std::int64_t> kv_memory) {
  const SchedulerCounts counts = scheduler.counts();
  OrderedJson json;
  json["model"] = model.name;
  json["max_tokens"] = count_or_null(model.max_tokens);
  json["kv_memory"] = kv_memory ? OrderedJson(*kv_memory) : OrderedJson();
  json["kv_allocated"] = counts.kv_allocated;
  json["kv_free"] = counts.kv_free;
  json["keep_ratio"] = counts.keep_ratio;
  json["running"] = counts.running;
  json["waiting"] = counts.waiting;
  json["prefixes"] = counts.prefixes;
  json["sequences"] = OrderedJson::array();
  for (const SequenceStatus& sequence : scheduler.sequences()) {
    OrderedJson one;
    one["request"] = sequence.request;
    one["choice"] = sequence.choice;
    one["phase"] = sequence.phase;
    one["tokens"] = sequence.tokens;
    one["new_tokens"] = sequence.new_tokens;
    one["evict_ratio"] = sequence.evict_ratio;
    one["kv_bytes"] = sequence.kv_bytes;
    one["full_kv_bytes"] = sequence.full_kv_bytes;
    json["sequences"].push_back(std::move(one));
  }
  return files::json_text(json);
}

std::string metrics_text(const SchedulerCounts& counts, const ServedModel& model) {
  std::string text;
  std::string value_of_label;
  for (const char letter : files::shown(model.name, 200)) {
    if (letter == '"' || letter == '\\') value_of_label += '\\';
    value_of_label += letter;
  }
  const std::string labels = fmt::format("{{model_name=\"{}\"}}", value_of_label);
  const auto add = [&](const char* metric, const char* type, const char* help, double value) {
    text += fmt::format("# HELP kvzap_{0} {1}\n# TYPE kvzap_{0} {2}\nkvzap_{0}{3} {4}\n", metric,
                        help, type, labels, value);
  };
  const auto gauge = [&](const char* name, const char* help, auto value) {
    add(name, "gauge", help, static_cast<double>(value));
  };
  const auto counter = [&](const char* name, const char* help, auto value) {
    add(name, "counter", help, static_cast<double>(value));
  };
  gauge("requests_running", "Sequences in the batch.", counts.running);
  gauge("requests_waiting", "Sequences in the queue.", counts.waiting);
  gauge("prefixes", "Kept cache states of prompts.", counts.prefixes);
  gauge("kv_allocated_bytes", "Bytes of rank 0 in pages, rings and states.", counts.kv_allocated);
  gauge("kv_free_bytes", "Free bytes of rank 0 for pages, rings and states.", counts.kv_free);
  gauge("keep_ratio", "Mean kept share of pairs over finished answers.", counts.keep_ratio);
  counter("requests_finished_total", "Requests answered.", counts.finished);
  counter("requests_cancelled_total", "Requests whose client disconnected.", counts.cancelled);
  counter("requests_failed_total", "Requests that ended with an error.", counts.failed);
  counter("requests_refused_total", "Requests refused because the queue was full.", counts.refused);
  counter("preemptions_total", "Sequences freed to make room and computed again.",
          counts.preempted);
  counter("prefixes_evicted_total", "Kept states freed to make room.", counts.prefixes_evicted);
  counter("steps_total", "Model steps.", counts.steps);
  counter("prompt_tokens_total", "Prompt tokens that ran.", counts.prompt_tokens);
  counter("cached_prompt_tokens_total", "Prompt tokens taken from kept states.",
          counts.cached_tokens);
  counter("generation_tokens_total", "Generated tokens.", counts.new_tokens);
  counter("step_seconds_total", "Time in steps.", counts.step_seconds);
  counter("scheduler_seconds_total", "Time of the scheduler between steps.", counts.own_seconds);
  return text;
}

}  // namespace kvzap::server
