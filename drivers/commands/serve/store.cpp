#include "commands/serve/store.hpp"

#include <fmt/format.h>

#include "commands/support/model_loading.hpp"
#include "commands/support/version.hpp"
#include "console/console.hpp"
#include "files/quote.hpp"
#include "options/usage.hpp"

namespace kvzap::driver {
namespace {

/// The text of a pruning in which hashes of files stand for their names.
std::string identity_of(Pruning pruning) {
  if (!pruning.prunes()) return "none";
  pruning.policy = pruning.policy.with_files(
      [](const std::string&, const PolicyParameter& parameter, const std::string& value) {
        return parameter.names_file(value) ? hash_of_policy_file(value) : value;
      });
  if (!pruning.surrogate.empty()) pruning.surrogate = hash_of_policy_file(pruning.surrogate);
  return pruning.text();
}

/// The options of a server on which rows depend, beside its model's files and a request's pruning.
std::string setting_of(const ServeOptions& options, const ModelSetup& setup,
                       const Pruning& pruning) {
  const auto seed = options.random_weights ? fmt::format("{}", *options.random_weights) : "none";
  return fmt::format("dtype {} layers {} of {} rope {} {} weights {} random {} window {}",
                     options.dtype, setup.config.num_hidden_layers, setup.all_layers,
                     options.rope.scaling, options.rope.scale.value_or(0), options.weights, seed,
                     pruning.window);
}

}  // namespace

void declare_prefix_store(CLI::App& app, ServeOptions& o, const std::string& group) {
  app.add_option("--prefix-store", o.prefix_store,
                 "folder with the pruned states of documents, which a later server finds again; it "
                 "is made for its owner alone; default: none")
      ->type_name("DIR")
      ->group(group);
  app.add_option("--prefix-store-size", o.prefix_store_size,
                 "bytes of that folder's states; the least recently used ones are removed")
      ->capture_default_str()
      ->type_name("SIZE")
      ->group(group);
}

void check_prefix_store(const ServeOptions& options) {
  parse_bytes(options.prefix_store_size, "--prefix-store-size");
  require(options.prefix_store.empty() || has_snapshots,
          "--prefix-store: this kvzap was built without HDF5 (KVZAP_ENABLE_HDF5=OFF)");
}

std::unique_ptr<server::PrefixStore> open_prefix_store(const ServeOptions& o,
                                                       const ModelSetup& setup,
                                                       const Pruning& pruning,
                                                       const server::ServedModel& model) {
  const ModelHashes hashes = hashes_of_model(o.model, !o.random_weights);
  server::PrefixStore::Options options;
  options.folder = o.prefix_store;
  options.most_bytes = parse_bytes(o.prefix_store_size, "--prefix-store-size");
  options.least_tokens = o.least_stored_tokens;
  options.model = model.name;
  options.model_hash = hashes.model;
  options.tokenizer_hash = hashes.tokenizer;
  options.kvzap_version = version;
  options.dtype = dtype_from_name(o.dtype);
  options.setting = setting_of(o, setup, pruning);
  options.identity_of = identity_of;
  if (model.tokenizer) {
    options.text_of = [&model](const std::vector<TokenId>& tokens) {
      return model.tokenizer->decode(tokens);
    };
  }
  options.warn = [](const std::string& sentence) {
    say_without_waiting(
        fmt::format("kvzap: warning: prefix store: {}\n", files::shown_message(sentence)));
  };
  try {
    return std::make_unique<server::PrefixStore>(std::move(options));
  } catch (const Error& error) {
    throw Error(fmt::format("--prefix-store: {}", error.what()));
  }
}

}  // namespace kvzap::driver
