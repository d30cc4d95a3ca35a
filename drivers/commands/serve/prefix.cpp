#include "commands/serve/prefix.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <ctime>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>
#include <utility>

#include "commands/serve/store.hpp"
#include "commands/support/setup.hpp"
#include "console/console.hpp"
#include "files/json_file.hpp"
#include "files/plain_text.hpp"
#include "files/quote.hpp"
#include "options/policy_options.hpp"
#include "options/usage.hpp"
#include "server/segments.hpp"

namespace kvzap::driver {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;
using server::StoredPrefix;

std::string time_text(std::int64_t nanoseconds) {
  constexpr std::int64_t second = 1'000'000'000;
  return fmt::format("{:%Y-%m-%dT%H:%M:%SZ}",
                     fmt::gmtime(static_cast<std::time_t>(nanoseconds / second)));
}

void print(const std::vector<StoredPrefix>& states, bool as_json) {
  std::int64_t bytes = 0;
  for (const StoredPrefix& state : states) bytes += state.bytes;
  if (as_json) {
    ordered_json all = {{"bytes", bytes}, {"prefixes", ordered_json::array()}};
    for (const StoredPrefix& state : states) {
      all["prefixes"].push_back({{"id", state.id},
                                 {"model", state.model},
                                 {"tokens", state.tokens},
                                 {"rows", state.rows},
                                 {"bytes", state.bytes},
                                 {"last_use", time_text(state.used)},
                                 {"pruning", state.pruning},
                                 {"kv_type", state.kv_type},
                                 {"text", state.text}});
    }
    return write_whole("-", files::json_lines(all));
  }
  constexpr std::size_t name_bytes = 24, text_bytes = 60;
  std::string text = fmt::format("{:16}  {:20}  {:24} {:>9} {:>11} {:>14}  {}\n", "id", "last use",
                                 "model", "tokens", "rows", "bytes", "text");
  for (const StoredPrefix& state : states) {
    text += fmt::format("{:16}  {:20}  {:24} {:>9} {:>11} {:>14}  {}\n", state.id,
                        time_text(state.used), files::shown(state.model, name_bytes), state.tokens,
                        state.rows, state.bytes, files::shown(state.text, text_bytes));
  }
  write_whole("-", text);
}

std::vector<StoredPrefix> states_in(const PrefixOptions& options) {
  try {
    return server::stored_prefixes(options.prefix_store, [](const std::string& fault) {
      say("kvzap: warning: {}\n", files::shown_message(fault));
    });
  } catch (const Error& error) {
    throw Error(fmt::format("--prefix-store: {}", error.what()));
  }
}

void list(const PrefixOptions& options) {
  print(states_in(options), options.as_json);
  flush_stdout();
}

/// Removes files by their ids, also damaged ones.
int remove(const PrefixOptions& options) {
  std::vector<std::string> ids = options.ids;
  if (options.removes_all) {
    ids = server::ids_of_stored_prefixes(options.prefix_store);
  }
  int status = 0;
  std::int64_t removed = 0;
  for (const std::string& id : ids) {
    std::error_code error;
    if (fs::remove(server::file_of_stored_prefix(options.prefix_store, id), error)) {
      ++removed;
      continue;
    }
    say("kvzap: error: {}: {}\n", id, error ? error.message() : "there is no such stored prefix");
    status = 1;
  }
  if (!options.quiet) say("kvzap: removed {} of {}\n", removed, ids.size());
  return status;
}

/// The context that requests with this document as the first part of a message begin with.
server::Segment context_of(const std::string& document, const PrefixOptions& options,
                           const server::ServedModel& model) {
  if (!model.tokenizer) throw Error("prefix add needs a tokenizer: tokenizer.json is missing");
  if (options.raw) {
    return {server::Segment::Kind::context, model.tokenizer->encode(document), {}, false};
  }
  const std::string question = "?";
  std::vector<ChatMessage> messages;
  std::vector<std::vector<std::string>> parts;
  if (options.system) {
    messages.push_back({ChatRole::system, *options.system});
    parts.push_back({*options.system});
  }
  messages.push_back({ChatRole::user, document + question});
  parts.push_back({document, question});
  const std::vector<server::Segment> segments =
      server::segments_of(messages, parts, model.thinking, model);
  if (segments.size() < 2 || segments.front().kind != server::Segment::Kind::context) {
    throw Error(
        "the chat template changes messages, so no question can follow a stored document; --raw "
        "stores it for /v1/completions");
  }
  server::Segment context = segments.front();
  context.cuts.clear();  // the beginning alone is no document
  return context;
}

int add(PrefixOptions& options, const Communicator& comm) {
  OwnRequests own;
  own.make = [&](const server::ServedModel& model) {
    std::vector<server::GenerationRequest> requests;
    for (const std::string& file : options.files) {
      server::GenerationRequest request;
      request.prompt = {context_of(files::read_plain_text(file, "-f"), options, model)};
      request.max_new_tokens = 1;
      requests.push_back(std::move(request));
    }
    return requests;
  };
  own.finish = [&](const std::vector<OwnRequests::Result>& results) {
    int status = 0;
    std::set<std::string> ids;
    for (std::size_t i = 0; i < results.size(); ++i) {
      const auto& [error, id] = results[i];
      if (error.empty() && !id.empty()) {
        ids.insert(id);
        continue;
      }
      say("kvzap: error: {}: {}\n", files::shown_message(options.files[i]),
          !error.empty() ? files::shown_message(error)
                         : "its state was not stored: it could not be written, or it is larger "
                           "than --prefix-store-size or --kv-memory");
      status = 1;
    }
    std::vector<StoredPrefix> stored = states_in(options);
    stored.erase(
        std::remove_if(stored.begin(), stored.end(),
                       [&](const StoredPrefix& state) { return ids.count(state.id) == 0; }),
        stored.end());
    print(stored, options.as_json);
    flush_stdout();
    return status;
  };
  return answer_own(options, own, comm);
}

}  // namespace

void declare(CLI::App& app, PrefixOptions& o) {
  app.add_option(
         "action", o.action,
         "list the stored states; add documents, with the options of kvzap serve; or remove "
         "states")
      ->required()
      ->check(CLI::IsMember({"list", "add", "remove"}));
  app.add_option("id", o.ids, "states to remove, by their ids in the list")->type_name("ID");
  const auto store = "Stored prefixes";
  declare_prefix_store(app, o, store);
  app.add_option(
         "-f,--file", o.files,
         "document to add, one state for each; of requests it is the first of several parts "
         "of the first message. May be repeated")
      ->type_name("FILE")
      ->group(store);
  app.add_option("--system", o.system, "system message before the documents")
      ->type_name("TEXT")
      ->group(store);
  app.add_flag("--raw", o.raw, "add documents for /v1/completions, without a chat template")
      ->group(store);
  app.add_flag("--all", o.removes_all, "remove all states of the folder")->group(store);
  app.add_flag("--json", o.as_json, "print JSON")->group(store);
  app.add_option("--kv-memory", o.kv_memory,
                 "memory for keys and values, over all ranks; default: four fifths of the free "
                 "memory after the weights are loaded")
      ->type_name("SIZE")
      ->group(store);
  declare_model(app, o);
  declare_context(app, o);
  declare_pruning(app, o);
  declare_console(app, o);
}

void check_options(const PrefixOptions& o, const CLI::App& app) {
  require(!o.prefix_store.empty(), "no folder of states: give one with --prefix-store DIR");
  check_prefix_store(o);
  const bool adds = o.action == "add", removes = o.action == "remove";
  const std::set<std::string> of_folder = {"action", "--prefix-store", "--help", "--quiet"};
  for (const CLI::Option* option : app.get_options()) {
    const std::string name = option->get_name();
    if (option->count() == 0 || of_folder.count(name) > 0) continue;
    const bool fits = name == "--json"                  ? !removes
                      : name == "id" || name == "--all" ? removes
                                                        : adds;
    require(fits, fmt::format("{} has no effect with kvzap prefix {}", name, o.action));
  }
  if (adds) {
    require(!o.files.empty(), "no document: give one with -f FILE");
    require(!o.system || !o.raw,
            "--system cannot be combined with --raw: only a chat template has "
            "a system message");
    check_options(static_cast<const ServeOptions&>(o));
  }
  require(!removes || o.ids.empty() == o.removes_all,
          "kvzap prefix remove needs the ids of states, or --all");
  for (const std::string& id : o.ids) {
    require(!server::file_of_stored_prefix("", id).empty(),
            fmt::format("{} is no id; expected 16 hexadecimal digits, as kvzap prefix list prints "
                        "them",
                        files::in_quotes(id)));
  }
}

int prefix(PrefixOptions& options, const Communicator& comm) {
  if (options.action == "add") {
    options.least_stored_tokens = 1;
    return add(options, comm);
  }
  int status = 0;
  comm.agree_on_root([&] {
    if (options.action == "list") {
      list(options);
    } else {
      status = remove(options);
    }
  });
  return static_cast<int>(comm.all_reduce_max(std::int64_t{status}));
}

}  // namespace kvzap::driver
