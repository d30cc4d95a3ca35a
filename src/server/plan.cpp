#include "server/plan.hpp"

#include "parallel/message.hpp"

namespace kvzap {

/// As text.
template <class Visit>
void list_fields(Pruning& pruning, Visit& visit) {
  std::string text = Visit::reads ? std::string() : pruning.text();
  visit("text", text);
  if (Visit::reads) pruning = Pruning::parse(text);
}

template <class Visit>
void list_fields(PageFormat& format, Visit& visit) {
  visit("keys", format.keys);
  visit("values", format.values);
}

}  // namespace kvzap

namespace kvzap::server {

template <class Visit>
void list_fields(PlannedSequence& sequence, Visit& visit) {
  visit("handle", sequence.handle);
  visit("source", sequence.source);
  visit("pruning", sequence.pruning);
  visit("page_format", sequence.page_format);
  visit("tokens", sequence.tokens);
  visit("file", sequence.file);
}

template <class Visit>
void list_fields(PlannedFile& stored, Visit& visit) {
  visit("handle", stored.handle);
  visit("file", stored.file);
}

template <class Visit>
void list_fields(PlannedTakeBack& taken, Visit& visit) {
  visit("handle", taken.handle);
  visit("tokens", taken.tokens);
}

template <class Visit>
void list_fields(PlannedSpan& span, Visit& visit) {
  visit("handle", span.handle);
  visit("part", span.part);
  visit("output", span.output);
  visit("ends_context", span.ends_context);
  visit("context_follows", span.context_follows);
  visit("keep_as", span.keep_as);
  visit("spare_as", span.spare_as);
  visit("tokens", span.tokens);
}

template <class Visit>
void list_fields(Plan& plan, Visit& visit) {
  visit("take_backs", plan.take_backs);
  visit("reports", plan.reports);
  visit("frees", plan.frees);
  visit("trims", plan.trims);
  visit("creates", plan.creates);
  visit("spans", plan.spans);
  visit("stores", plan.stores);
  visit("advances", plan.advances);
  visit("sleeps", plan.sleeps);
  visit("ends", plan.ends);
  visit("counts", plan.counts);
}

std::string Plan::encode() const { return parallel::to_message(*this); }

Plan Plan::decode(const std::string& message) {
  Plan plan;
  parallel::from_message(message, plan);
  return plan;
}

void share(Plan& plan, const Communicator& comm) { parallel::broadcast(comm, 0, plan); }

}  // namespace kvzap::server
