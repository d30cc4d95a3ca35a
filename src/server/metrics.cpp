#include <fmt/format.h>

#include <kvzap/server/protocol.hpp>
#include <string>
#include <vector>

#include "files/quote.hpp"

namespace kvzap::server {
namespace {

/// Writes metrics in Prometheus' text format. A metric may have a second name, vLLM's, under which
/// dashboards for vLLM find it.
class MetricsWriter {
 public:
  explicit MetricsWriter(const std::string& model) {
    for (const char letter : files::shown(model, 200)) {
      if (letter == '"' || letter == '\\') m_model += '\\';
      m_model += letter;
    }
    m_model = "model_name=\"" + m_model + "\"";
  }

  using Names = std::vector<const char*>;

  template <class Value>
  void gauge(const Names& names, const char* help, Value value) {
    for (const char* const name : names) {
      head(name, "gauge", help);
      line(name, "", static_cast<double>(value));
    }
  }
  template <class Value>
  void counter(const Names& names, const char* help, Value value) {
    for (const char* const name : names) {
      head(name, "counter", help);
      line(name, "", static_cast<double>(value));
    }
  }
  void histogram(const Names& names, const char* help, const Histogram& histogram) {
    for (const char* const name : names) {
      head(name, "histogram", help);
      const std::string bucket = std::string(name) + "_bucket";
      std::int64_t count = 0;
      for (std::size_t i = 0; i < Histogram::bounds.size(); ++i) {
        count += histogram.count(i);
        line(bucket, fmt::format(",le=\"{}\"", Histogram::bounds[i]), static_cast<double>(count));
      }
      count += histogram.count(Histogram::bounds.size());
      line(bucket, ",le=\"+Inf\"", static_cast<double>(count));
      line(std::string(name) + "_sum", "", histogram.sum());
      line(std::string(name) + "_count", "", static_cast<double>(count));
    }
  }
  void head(const std::string& name, const char* type, const char* help) {
    m_text += fmt::format("# HELP {0} {1}\n# TYPE {0} {2}\n", name, help, type);
  }
  void line(const std::string& name, const std::string& labels, double value) {
    m_text += fmt::format("{}{{{}{}}} {}\n", name, m_model, labels, value);
  }
  std::string text() && { return std::move(m_text); }

 private:
  std::string m_model;
  std::string m_text;
};

}  // namespace

std::string metrics_text(const SchedulerCounts& counts, const ServedModel& model) {
  MetricsWriter to(model.name);
  to.gauge({"kvzap_requests_running", "vllm:num_requests_running"},
           "Sequences in the batch, and prompts that pause.", counts.running);
  to.gauge({"kvzap_requests_waiting", "vllm:num_requests_waiting"}, "Sequences in the queue.",
           counts.waiting);
  to.gauge({"kvzap_prefixes"}, "Kept cache states of prompts.", counts.prefixes);
  to.gauge({"kvzap_kv_allocated_bytes"}, "Bytes of rank 0 in pages, rings and states.",
           counts.kv_allocated);
  to.gauge({"kvzap_kv_free_bytes"}, "Free bytes of rank 0 for pages, rings and states.",
           counts.kv_free);
  const auto all = static_cast<double>(counts.kv_used + counts.kv_free);
  to.gauge({"kvzap_kv_usage_ratio", "vllm:kv_cache_usage_perc"},
           "Share of rank 0's cache memory in use, kept states included; 1: all.",
           all > 0 ? static_cast<double>(counts.kv_used) / all : 0);
  to.gauge({"kvzap_keep_ratio"}, "Mean kept share of pairs over finished answers.",
           counts.keep_ratio);
  to.counter({"kvzap_requests_finished_total"}, "Requests answered.", counts.finished);
  to.counter({"kvzap_requests_cancelled_total"}, "Requests whose client disconnected.",
             counts.cancelled);
  to.counter({"kvzap_requests_failed_total"}, "Requests that ended with an error.", counts.failed);
  to.counter({"kvzap_requests_refused_total"}, "Requests refused because the queue was full.",
             counts.refused);
  for (const char* const name : {"kvzap_answers_total", "vllm:request_success_total"}) {
    to.head(name, "counter", "Answers by the reason of their end.");
    to.line(name, ",finished_reason=\"stop\"", static_cast<double>(counts.stopped));
    to.line(name, ",finished_reason=\"length\"", static_cast<double>(counts.cut_by_length));
  }
  to.counter({"kvzap_preemptions_total", "vllm:num_preemptions_total"},
             "Sequences freed to make room and computed again.", counts.preempted);
  to.counter({"kvzap_prefixes_evicted_total"}, "Kept states freed to make room.",
             counts.prefixes_evicted);
  to.counter({"kvzap_steps_total"}, "Model steps.", counts.steps);
  to.counter({"kvzap_prompt_tokens_total"}, "Prompt tokens that ran.", counts.prompt_tokens);
  to.counter({"kvzap_cached_prompt_tokens_total", "vllm:prefix_cache_hits_total"},
             "Prompt tokens taken from kept states.", counts.cached_tokens);
  to.counter({"vllm:prompt_tokens_total"}, "Prompt tokens that ran or were taken from kept states.",
             counts.prompt_tokens + counts.cached_tokens);
  to.counter({"kvzap_generation_tokens_total", "vllm:generation_tokens_total"}, "Generated tokens.",
             counts.new_tokens);
  to.counter({"kvzap_drafted_tokens_total", "vllm:spec_decode_num_draft_tokens_total"},
             "Guessed tokens that steps have checked (--lookup).", counts.drafted_tokens);
  to.counter({"kvzap_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"},
             "Guessed tokens that became a part of an answer.", counts.accepted_tokens);
  to.counter({"kvzap_step_seconds_total"}, "Time in steps.", counts.step_seconds);
  to.counter({"kvzap_scheduler_seconds_total"}, "Time of the scheduler between steps.",
             counts.own_seconds);
  to.gauge({"kvzap_stored_prefixes"}, "States in the folder of --prefix-store.",
           counts.stored_prefixes);
  to.gauge({"kvzap_stored_prefix_bytes"}, "Bytes of these states.", counts.stored_prefix_bytes);
  to.counter({"kvzap_prefixes_stored_total"}, "Kept states written to files.",
             counts.prefixes_stored);
  to.counter({"kvzap_prefixes_restored_total"}, "Kept states read from files.",
             counts.prefixes_restored);
  to.histogram({"kvzap_queue_seconds", "vllm:request_queue_time_seconds"},
               "Time from a request's arrival to its first step.", counts.queue_seconds);
  to.histogram({"kvzap_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"},
               "Time from a request's arrival to the first token of an answer.",
               counts.first_token_seconds);
  to.histogram({"kvzap_inter_token_latency_seconds", "vllm:inter_token_latency_seconds"},
               "Time between two tokens of an answer.", counts.between_tokens_seconds);
  to.histogram({"kvzap_e2e_request_latency_seconds", "vllm:e2e_request_latency_seconds"},
               "Time from a request's arrival to the end of an answer.", counts.answer_seconds);
  return std::move(to).text();
}

}  // namespace kvzap::server
