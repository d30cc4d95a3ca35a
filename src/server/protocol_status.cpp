#include <kvzap/server/protocol.hpp>
#include <nlohmann/json.hpp>

#include "files/json_file.hpp"

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
  json["policy"] = model.policy.empty() ? OrderedJson() : OrderedJson(model.policy);
  json["amounts"] = model.amounts;
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

}  // namespace kvzap::server
