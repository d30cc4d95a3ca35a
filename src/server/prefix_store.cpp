#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <kvzap/server/prefix_store.hpp>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>
#include <utility>

#include "base/stopwatch.hpp"
#include "files/fnv.hpp"
#include "files/json_file.hpp"
#include "files/quote.hpp"
#include "files/temporary_file.hpp"
#include "server/prefix_tree.hpp"

namespace kvzap::server {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using nlohmann::ordered_json;

constexpr const char* mark_of_files = "kvzap_prefix";
constexpr std::int64_t version_of_files = 1;
constexpr std::string_view name_begin = "kvzap-prefix-", name_end = ".h5";
constexpr std::size_t id_digits = 16;
constexpr std::size_t shown_tokens = 64, shown_bytes = 200;
constexpr std::int64_t lowest_mark = -16;
constexpr double index_holds_for = 1;  // seconds

std::string name_of_id(const std::string& id) {
  return fmt::format("{}{}{}", name_begin, id, name_end);
}

/// Returns the id in the beginning of a file's name, or "" if it is not one of ours.
std::string id_in(std::string_view name) {
  if (name.size() < name_begin.size() + id_digits + name_end.size()) return "";
  if (name.substr(0, name_begin.size()) != name_begin) return "";
  const std::string_view id = name.substr(name_begin.size(), id_digits);
  if (id.find_first_not_of("0123456789abcdef") != std::string_view::npos) return "";
  if (name.substr(name_begin.size() + id_digits, name_end.size()) != name_end) return "";
  return std::string(id);
}

bool is_name_of_state(std::string_view name) {
  return name.size() == name_begin.size() + id_digits + name_end.size() && !id_in(name).empty();
}

struct FileStatus {
  std::int64_t bytes = 0;
  std::int64_t used = 0;
};

/// Returns nothing for all but regular files.
std::optional<FileStatus> status_of(const fs::path& file) {
  struct stat status = {};
  if (::lstat(file.c_str(), &status) != 0 || !S_ISREG(status.st_mode)) return {};
  constexpr std::int64_t second = 1'000'000'000;
  return FileStatus{status.st_size, status.st_mtim.tv_sec * second + status.st_mtim.tv_nsec};
}

/// Returns the names of a folder's stored states with their status, and the targets of unfinished
/// files.
struct Listing {
  std::map<std::string, FileStatus> states;
  std::set<std::string> unfinished;
};

Listing listing_of(const fs::path& folder) {
  Listing found;
  std::error_code error;
  fs::directory_iterator entry(folder, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    const std::string id = id_in(name);
    if (id.empty()) continue;
    if (is_name_of_state(name)) {
      if (const auto status = status_of(entry->path())) found.states[name] = *status;
    } else if (name.compare(name_of_id(id).size(), 5, ".tmp-") == 0) {
      found.unfinished.insert(name_of_id(id));
    }
  }
  if (error) throw Error(fmt::format("{}: {}", folder.string(), error.message()));
  return found;
}

std::string hash_of(const std::string& kind, const PrefixKey& key) {
  std::uint64_t hash = files::fnv1a(kind);
  for (const std::int32_t element : key) {
    const auto bits = static_cast<std::uint32_t>(element);
    const char bytes[] = {static_cast<char>(bits), static_cast<char>(bits >> 8u),
                          static_cast<char>(bits >> 16u), static_cast<char>(bits >> 24u)};
    hash = files::fnv1a({bytes, sizeof(bytes)}, hash);
  }
  return fmt::format("{:016x}", hash);
}

std::int64_t count_tokens(const PrefixKey& key, std::int64_t length) {
  return std::count_if(key.begin(), key.begin() + length,
                       [](auto element) { return element >= 0; });
}

/// Returns a text in one line, without escapes for its line breaks.
std::string first_words(const std::string& text) {
  std::string words;
  for (const char c : text) {
    const bool is_blank = c == ' ' || c == '\t' || c == '\n' || c == '\r';
    if (!is_blank) words += c;
    if (is_blank && !words.empty() && words.back() != ' ') words += ' ';
  }
  return files::shown(words, shown_bytes);
}

/// Adds the tokens and marks of a key to a snapshot: marks as [number of tokens before it, mark].
ordered_json marks_of(const PrefixKey& key, std::vector<TokenId>& tokens) {
  ordered_json marks = ordered_json::array();
  for (const std::int32_t element : key) {
    if (element < 0) {
      marks.push_back({tokens.size(), element});
    } else {
      tokens.push_back(element);
    }
  }
  return marks;
}

PrefixKey key_from(const json& marks, const std::vector<TokenId>& tokens) {
  PrefixKey key;
  std::size_t done = 0;
  for (const json& mark : marks) {
    const auto place = mark.at(0).get<std::uint64_t>();
    const auto value = mark.at(1).get<std::int64_t>();
    if (place < done || place > tokens.size() || value >= 0 || value < lowest_mark) {
      throw Error(fmt::format("mark {} after {} tokens; expected {} to -1, after {} to {} tokens",
                              value, place, lowest_mark, done, tokens.size()));
    }
    key.insert(key.end(), tokens.begin() + static_cast<std::ptrdiff_t>(done),
               tokens.begin() + static_cast<std::ptrdiff_t>(place));
    key.push_back(static_cast<std::int32_t>(value));
    done = place;
  }
  key.insert(key.end(), tokens.begin() + static_cast<std::ptrdiff_t>(done), tokens.end());
  return key;
}

/// Reads all but the rows of a stored state. Throws Error if the file is none.
StoredPrefix read_state(const fs::path& file, const FileStatus& status) {
  const SnapshotReader reader(file);
  const SnapshotHeader& header = reader.header();
  const SnapshotInfo& info = header.info;
  StoredPrefix state;
  state.file = file;
  state.id = id_in(file.filename().string());
  state.model = info.model;
  state.bytes = status.bytes;
  state.used = status.used;
  state.tokens = static_cast<std::int64_t>(info.token_ids.size());
  for (const auto& offsets : header.offsets) state.rows += offsets.back();
  try {
    const json recorded = files::parse_json_object(info.run_state, "run_state");
    const auto version = recorded.at(mark_of_files).get<std::int64_t>();
    if (version != version_of_files) {
      throw Error(fmt::format("its version is {}; expected {}", version, version_of_files));
    }
    recorded.at("kind").get_to(state.kind);
    recorded.at("pruning").get_to(state.pruning);
    recorded.at("kv_type").get_to(state.kv_type);
    recorded.at("text").get_to(state.text);
    recorded.at("whole_from").get_to(state.whole_from);
    state.key = key_from(recorded.at("marks"), info.token_ids);
  } catch (const std::exception& error) {
    throw Error(fmt::format("snapshot {}: no stored prefix: {}", file.string(), error.what()));
  }
  const auto length = static_cast<std::int64_t>(state.key.size());
  if (state.tokens == 0 || state.whole_from < 0 || state.whole_from > length ||
      hash_of(state.kind, state.key) != state.id) {
    throw Error(fmt::format("snapshot {}: its name and its prefix of {} tokens do not match",
                            file.string(), state.tokens));
  }
  return state;
}

/// A file that this process may not open, or that another one has just removed, is not damaged.
bool can_open(const fs::path& file) { return std::ifstream(file, std::ios::binary).is_open(); }

}  // namespace

std::vector<StoredPrefix> stored_prefixes(const fs::path& folder,
                                          const std::function<void(const std::string&)>& tell) {
  std::vector<StoredPrefix> states;
  for (const auto& [name, status] : listing_of(folder).states) {
    try {
      states.push_back(read_state(folder / name, status));
    } catch (const Error& error) {
      tell(error.what());
    }
  }
  std::sort(states.begin(), states.end(),
            [](const StoredPrefix& a, const StoredPrefix& b) { return a.used < b.used; });
  return states;
}

std::vector<std::string> ids_of_stored_prefixes(const fs::path& folder) {
  std::vector<std::string> ids;
  for (const auto& [name, status] : listing_of(folder).states) ids.push_back(id_in(name));
  return ids;
}

fs::path file_of_stored_prefix(const fs::path& folder, const std::string& id) {
  const std::string name = name_of_id(id);
  return is_name_of_state(name) ? folder / name : fs::path();
}

/// The states that were in the folder when it was last looked at.
struct PrefixStore::Index {
  PrefixTree tree;  // of kind and key; its states are the numbers of entries
  std::map<int, StoredPrefix> entries;
  std::map<std::string, int> numbers;  // by the file's name
  std::set<std::string> refused;       // names of files that are not read again
  std::set<std::string> too_large;     // ids of states that alone exceed the bound
  std::map<std::string, std::string> kinds;
  int next = 0;
  std::optional<base::Clock::time_point> looked;

  /// The tree's key.
  static PrefixKey whole(const std::string& kind, const PrefixKey& key) {
    PrefixKey all(kind.begin(), kind.end());
    all.insert(all.end(), key.begin(), key.end());
    return all;
  }
};

PrefixStore::PrefixStore(Options options)
    : m_options(std::move(options)), m_index(std::make_unique<Index>()) {
  const fs::path& folder = m_options.folder;
  std::error_code error;
  if (fs::create_directories(folder, error)) {
    // It has the text of prompts.
    fs::permissions(folder, fs::perms::owner_all, error);
  }
  if (error) throw Error(fmt::format("{}: {}", folder.string(), error.message()));
  std::set<std::string> targets = listing_of(folder).unfinished;
  targets.insert(name_of_id(std::string(id_digits, '0')));  // tests whether files can be written
  for (const std::string& target : targets) {
    for (const std::string& note : files::check_file_writable(folder / target, "prefix store")) {
      warn(note);
    }
  }
  look();
  bound();
}

PrefixStore::~PrefixStore() = default;

void PrefixStore::warn(const std::string& sentence) const {
  if (m_options.warn) m_options.warn(sentence);
}

std::string PrefixStore::kind_of(const Pruning& pruning, const PageFormat& format) {
  const std::string name = fmt::format("{} {} {}", static_cast<int>(format.keys),
                                       static_cast<int>(format.values), pruning.text());
  constexpr std::size_t most = 1024;  // requests may name any amounts
  if (m_index->kinds.size() > most) m_index->kinds.clear();
  std::string& kind = m_index->kinds[name];
  if (kind.empty()) {
    std::uint64_t hash = files::fnv_start;
    for (const std::string& part :
         {m_options.model_hash, m_options.setting,
          m_options.identity_of ? m_options.identity_of(pruning) : pruning.text(),
          fmt::format("{} {} {}", static_cast<int>(format.keys), static_cast<int>(format.values),
                      format.values_are_keys)}) {
      hash = files::fnv1a(fmt::format("{} {}", part.size(), part), hash);
    }
    kind = fmt::format("{:016x}", hash);
  }
  return kind;
}

void PrefixStore::take_in(StoredPrefix state) {
  const std::string name = state.file.filename().string();
  forget(name);
  const int number = m_index->next++;
  const auto before = static_cast<std::int64_t>(state.kind.size());
  m_index->tree.insert(Index::whole(state.kind, state.key), number, before + state.whole_from);
  m_index->numbers[name] = number;
  m_index->entries[number] = std::move(state);
}

void PrefixStore::forget(const std::string& name) {
  const auto found = m_index->numbers.find(name);
  if (found == m_index->numbers.end()) return;
  const StoredPrefix& state = m_index->entries.at(found->second);
  m_index->tree.erase(Index::whole(state.kind, state.key));
  m_index->entries.erase(found->second);
  m_index->numbers.erase(found);
}

void PrefixStore::remove(const std::string& name) {
  forget(name);
  std::error_code error;
  fs::remove(m_options.folder / name, error);  // another server may have been faster
  if (error) warn(fmt::format("{}: {}", (m_options.folder / name).string(), error.message()));
}

/// Compares the index with the folder.
void PrefixStore::look() {
  m_index->looked = base::Clock::now();
  const Listing found = listing_of(m_options.folder);
  std::vector<std::string> gone;
  for (const auto& [name, number] : m_index->numbers) {
    if (found.states.count(name) == 0) gone.push_back(name);
  }
  for (const std::string& name : gone) forget(name);
  for (const auto& [name, status] : found.states) {
    const auto known = m_index->numbers.find(name);
    if (known != m_index->numbers.end()) {
      m_index->entries.at(known->second).used = status.used;
      continue;
    }
    const fs::path file = m_options.folder / name;
    if (m_index->refused.count(name) > 0 || !can_open(file)) continue;
    try {
      take_in(read_state(file, status));
    } catch (const Error& error) {
      if (!can_open(file)) continue;
      warn(fmt::format("removed: {}", error.what()));
      remove(name);
    }
  }
}

std::optional<PrefixStore::Found> PrefixStore::find(const std::string& kind, const PrefixKey& key,
                                                    std::int64_t most) {
  try {
    if (!m_index->looked || base::seconds_since(*m_index->looked) > index_holds_for) look();
  } catch (const Error& error) {
    warn(error.what());
    return {};
  }
  const auto before = static_cast<std::int64_t>(kind.size());
  const PrefixKey whole = Index::whole(kind, key);
  PrefixTree::Found found = m_index->tree.longest(whole, before + most);
  const PrefixTree::Found cut = m_index->tree.longest_cut(whole, before + most);
  if (cut.length > found.length) found = cut;
  if (found.state < 0 || found.length <= before) return {};
  return Found{m_index->entries.at(found.state), found.length - before};
}

bool PrefixStore::wants(const std::string& kind, const PrefixKey& key) {
  const auto length = static_cast<std::int64_t>(key.size());
  if (m_index->too_large.count(hash_of(kind, key)) > 0) return false;
  const auto found = find(kind, key, length);
  const std::int64_t there = found ? found->length : 0;
  return count_tokens(key, length) - count_tokens(key, there) >= m_options.least_tokens;
}

PrefixStore::Place PrefixStore::place_for(const Pruning& pruning, const PageFormat& format,
                                          const PrefixKey& key, std::int64_t whole_from) {
  Place place;
  StoredPrefix& state = place.state;
  state.kind = kind_of(pruning, format);
  state.key = key;
  state.whole_from = whole_from;
  state.id = hash_of(state.kind, key);
  state.file = m_options.folder / name_of_id(state.id);
  state.model = m_options.model;
  state.pruning = pruning.text();
  state.kv_type = name_of(format, m_options.dtype);
  SnapshotInfo& info = place.info;
  info.model = m_options.model;
  info.model_hash = m_options.model_hash;
  info.tokenizer_hash = m_options.tokenizer_hash;
  info.kvzap_version = m_options.kvzap_version;
  const ordered_json marks = marks_of(key, info.token_ids);
  state.tokens = info.context_tokens = static_cast<std::int64_t>(info.token_ids.size());
  if (m_options.text_of) {
    const auto first = info.token_ids.begin();
    state.text = first_words(
        m_options.text_of({first, first + std::min<std::ptrdiff_t>(shown_tokens, state.tokens)}));
  }
  const ordered_json recorded = {{mark_of_files, version_of_files},
                                 {"kind", state.kind},
                                 {"pruning", state.pruning},
                                 {"kv_type", state.kv_type},
                                 {"text", state.text},
                                 {"whole_from", whole_from},
                                 {"marks", marks}};
  info.run_state = files::json_text(recorded);
  return place;
}

void PrefixStore::note_written(const StoredPrefix& state) {
  const auto status = status_of(state.file);
  if (!status) return;  // another server has removed it
  StoredPrefix written = state;
  written.bytes = status->bytes;
  written.used = status->used;
  m_index->refused.erase(state.file.filename().string());
  take_in(std::move(written));
  if (status->bytes > m_options.most_bytes) {
    warn(fmt::format("a state of {} tokens has {} bytes, more than all states may take",
                     state.tokens, status->bytes));
    m_index->too_large.insert(state.id);
  }
  bound();
}

void PrefixStore::note_used(const StoredPrefix& state) {
  // The time of the file system, which other servers compare.
  static_cast<void>(::utimensat(AT_FDCWD, state.file.c_str(), nullptr, 0));
}

void PrefixStore::refuse(const StoredPrefix& state, const std::string& reason) {
  const std::string name = state.file.filename().string();
  forget(name);
  if (!can_open(state.file)) return;
  bool is_damaged = false;
  try {
    is_damaged = !SnapshotReader(state.file).verify().empty();
  } catch (const Error&) {
    is_damaged = true;
  }
  warn(fmt::format("{}{}", is_damaged ? "removed: " : "", reason));
  if (is_damaged) return remove(name);
  m_index->refused.insert(name);
}

/// Removes the least recently used files until the others fit.
void PrefixStore::bound() {
  std::vector<std::pair<std::int64_t, std::string>> by_use;
  std::int64_t total = 0;
  std::map<std::string, FileStatus> states;
  try {
    states = listing_of(m_options.folder).states;
  } catch (const Error& error) {
    return warn(error.what());
  }
  for (const auto& [name, status] : states) {
    by_use.emplace_back(status.used, name);
    total += status.bytes;
  }
  std::sort(by_use.begin(), by_use.end());
  for (const auto& [used, name] : by_use) {
    if (total <= m_options.most_bytes) break;
    total -= states.at(name).bytes;
    remove(name);
  }
}

std::int64_t PrefixStore::size() const {
  return static_cast<std::int64_t>(m_index->entries.size());
}

std::int64_t PrefixStore::bytes() const {
  std::int64_t total = 0;
  for (const auto& [number, state] : m_index->entries) total += state.bytes;
  return total;
}

}  // namespace kvzap::server
