#include "eval/records.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <kvzap/core/types.hpp>
#include <set>

#include "files/fully.hpp"
#include "files/json_field.hpp"
#include "files/json_file.hpp"
#include "files/line_reader.hpp"
#include "files/temporary_file.hpp"

namespace kvzap::eval {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using nlohmann::ordered_json;

void read(const files::JsonField& field, std::string& value) { value = field.string(); }
void read(const files::JsonField& field, std::int64_t& value) { value = field.integer(); }
void read(const files::JsonField& field, double& value) { value = field.number(); }

void read(const files::JsonField& field, std::optional<double>& value) {
  value.reset();
  if (!field.is_null()) value = field.number();
}

template <class Value>
void read(const files::JsonField& field, std::vector<Value>& values) {
  values.resize(field.array_size());
  for (std::size_t i = 0; i < values.size(); ++i) read(field.element(i), values[i]);
}

bool is_beside_the_point(const std::string& path) {
  // The model's files are compared by hashes, independent of the folder.
  return path == "version" || path == "model.folder" || path == "model.name" ||
         path == "options.surrogate";
}

/// The name of a list's entry in messages.
std::string name_of_entry(const json& entry, std::size_t index) {
  for (const char* key : {"label", "file"}) {
    if (!entry.is_object()) continue;
    const auto name = entry.find(key);
    if (name != entry.end() && name->is_string()) return name->get<std::string>();
  }
  return std::to_string(index + 1);
}

void add_differences(const json& there, const json& here, const std::string& path,
                     std::vector<std::string>& found);

void add_object_differences(const json& there, const json& here, const std::string& path,
                            std::vector<std::string>& found) {
  const std::string prefix = path.empty() ? "" : path + ".";
  const json absent;
  for (const auto& [name, value] : here.items()) {
    add_differences(there.contains(name) ? there.at(name) : absent, value, prefix + name, found);
  }
  for (const auto& [name, value] : there.items()) {
    if (!here.contains(name)) add_differences(value, absent, prefix + name, found);
  }
}

/// Compares lists of named entries by name, then by order.
void add_list_differences(const json& there, const json& here, const std::string& path,
                          std::vector<std::string>& found) {
  const std::size_t before = found.size();
  const auto entries = [](const json& list) {
    json named = json::object();
    for (std::size_t i = 0; i < list.size(); ++i) named[name_of_entry(list[i], i)] = list[i];
    return named;
  };
  const json old_entries = entries(there), new_entries = entries(here);
  for (const auto& [name, value] : old_entries.items()) {
    if (!new_entries.contains(name)) {
      found.push_back(fmt::format("{}: {} is only in the recorded evaluation", path, name));
    }
  }
  for (const auto& [name, value] : new_entries.items()) {
    if (!old_entries.contains(name)) {
      found.push_back(fmt::format("{}: {} is only in the given evaluation", path, name));
    } else {
      add_differences(old_entries.at(name), value, fmt::format("{}.{}", path, name), found);
    }
  }
  if (found.size() == before) found.push_back(path + " are in another order");
}

void add_differences(const json& there, const json& here, const std::string& path,
                     std::vector<std::string>& found) {
  if (there == here || is_beside_the_point(path)) return;
  if (there.is_object() && here.is_object())
    return add_object_differences(there, here, path, found);
  if (there.is_array() && here.is_array()) return add_list_differences(there, here, path, found);
  const auto text = [](const json& value) {
    return value.is_null() ? std::string("absent") : value.dump();
  };
  found.push_back(fmt::format("{}: recorded {}, given {}", path, text(there), text(here)));
}

/// Names of folders may have any bytes.
std::string text_of(const ordered_json& description, int indent) {
  return description.dump(indent, ' ', false, ordered_json::error_handler_t::replace);
}

/// Whether a whole record follows. Then a damaged line before it is no interrupted write.
bool has_record(files::LineReader& reader) {
  while (reader.next()) {
    if (!reader.has_end()) return false;
    try {
      EvalRecord::parse(reader.line());
      return true;
    } catch (const Error&) {
    }
  }
  return false;
}

}  // namespace

std::string EvalRecord::to_json_line() const {
  ordered_json object = {{"task_file", task_file},
                         {"line", line},
                         {"id", id},
                         {"task", task},
                         {"metric", metric},
                         {"setting", setting},
                         {"policy", policy},
                         {"score", score ? ordered_json(*score) : ordered_json()},
                         {"answers", answers},
                         {"scores", scores},
                         {"expected", expected},
                         {"context_tokens", context_tokens},
                         {"question_tokens", question_tokens},
                         {"generated_tokens", generated_tokens},
                         {"evict_ratio", evict_ratio},
                         {"kept_rows", kept_rows},
                         {"cache_tokens", cache_tokens},
                         {"kv_bytes", kv_bytes},
                         {"full_kv_bytes", full_kv_bytes},
                         {"kv_bytes_at_end", kv_bytes_at_end},
                         {"full_kv_bytes_at_end", full_kv_bytes_at_end},
                         {"prefill_seconds", prefill_seconds},
                         {"decode_seconds", decode_seconds}};
  if (perplexity) object["perplexity"] = *perplexity;
  if (nll) object["nll"] = *nll;
  return files::json_text(object);
}

EvalRecord EvalRecord::parse(const std::string& line) {
  const json content = files::parse_json_object(line, "record");
  const files::JsonField object(content, "record");
  EvalRecord record;
  read(object.member("task_file"), record.task_file);
  read(object.member("line"), record.line);
  read(object.member("id"), record.id);
  read(object.member("task"), record.task);
  read(object.member("metric"), record.metric);
  read(object.member("setting"), record.setting);
  read(object.member("policy"), record.policy);
  read(object.member("score"), record.score);
  read(object.member("answers"), record.answers);
  read(object.member("scores"), record.scores);
  read(object.member("expected"), record.expected);
  read(object.member("context_tokens"), record.context_tokens);
  read(object.member("question_tokens"), record.question_tokens);
  read(object.member("generated_tokens"), record.generated_tokens);
  read(object.member("evict_ratio"), record.evict_ratio);
  read(object.member("kept_rows"), record.kept_rows);
  read(object.member("cache_tokens"), record.cache_tokens);
  read(object.member("kv_bytes"), record.kv_bytes);
  read(object.member("full_kv_bytes"), record.full_kv_bytes);
  read(object.member("kv_bytes_at_end"), record.kv_bytes_at_end);
  read(object.member("full_kv_bytes_at_end"), record.full_kv_bytes_at_end);
  read(object.member("prefill_seconds"), record.prefill_seconds);
  read(object.member("decode_seconds"), record.decode_seconds);
  read(object.member("perplexity"), record.perplexity);
  read(object.member("nll"), record.nll);
  return record;
}

std::vector<std::string> evaluation_differences(const json& there, const json& here) {
  std::vector<std::string> found;
  add_differences(there, here, "", found);
  return found;
}

EvaluationFolder::EvaluationFolder(fs::path folder) : m_folder(std::move(folder)) {
  std::error_code error;
  if (fs::exists(m_folder, error) && !fs::is_directory(m_folder, error)) {
    throw Error(fmt::format("-o {}: is a file; expected a folder", m_folder.string()));
  }
  fs::create_directories(m_folder, error);
  if (error) {
    throw Error(
        fmt::format("-o {}: the folder cannot be created: {}", m_folder.string(), error.message()));
  }
  const fs::path file = records_file();
  m_descriptor = ::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (m_descriptor < 0) throw files::system_error(file.string() + ": cannot be opened", errno);
  struct stat status = {};
  const bool is_regular = ::fstat(m_descriptor, &status) == 0 && S_ISREG(status.st_mode);
  // Some file systems have no locks. The evaluation continues without one.
  const bool is_taken =
      is_regular && ::flock(m_descriptor, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  if (is_regular && !is_taken) return;
  ::close(m_descriptor);
  throw Error(fmt::format("{}: {}", file.string(),
                          is_taken ? "another kvzap eval is writing to it" : "is no regular file"));
}

EvaluationFolder::~EvaluationFolder() { ::close(m_descriptor); }

void EvaluationFolder::begin(const ordered_json& description) {
  const fs::path file = description_file();
  std::error_code ignored;
  if (!fs::exists(file, ignored)) {
    struct stat status = {};
    if (::fstat(m_descriptor, &status) == 0 && status.st_size > 0) {
      throw Error(fmt::format("{}: expected the evaluation of {}, found no such file",
                              file.string(), records_file().string()));
    }
    // At its end this run would overwrite another evaluation's files.
    for (const char* name : {"summary.json", "summary.csv"}) {
      if (!fs::exists(m_folder / name, ignored)) continue;
      throw Error(fmt::format("{}: expected the evaluation of {}, found no such file",
                              file.string(), (m_folder / name).string()));
    }
    files::write_text(file, text_of(description, 2) + "\n");
    return;
  }
  // Converts to text and back, like the file, so that numbers compare equal.
  const auto found = evaluation_differences(
      files::read_json_object(file), files::parse_json(text_of(description, -1), "description"));
  if (found.empty()) return;
  constexpr std::size_t most = 8;
  std::string list;
  for (std::size_t i = 0; i < std::min(most, found.size()); ++i) {
    list += (i == 0 ? "" : "; ") + found[i];
  }
  if (found.size() > most) list += fmt::format("; and {} more", found.size() - most);
  throw Error(
      fmt::format("{} has another evaluation: {}. Give another folder with -o, or remove it",
                  m_folder.string(), list));
}

std::int64_t EvaluationFolder::read(const std::vector<std::string>& labels,
                                    const std::function<void(EvalRecord&&)>& take) {
  const fs::path file = records_file();
  files::LineReader reader(file, "records of kvzap eval");
  std::set<std::pair<std::string, std::int64_t>> prompts;
  std::vector<EvalRecord> prompt;
  std::int64_t position = 0, whole = 0;
  while (reader.next()) {
    const std::string where = reader.where();
    std::string wrong;
    try {
      if (!reader.has_end()) throw Error("the line has no end");
      prompt.push_back(EvalRecord::parse(reader.line()));
    } catch (const Error& error) {
      wrong = error.what();
    }
    if (!wrong.empty()) {
      if (has_record(reader)) {
        throw Error(fmt::format("{}: damaged, and records follow: {}", where, wrong));
      }
      break;
    }
    position += static_cast<std::int64_t>(reader.line().size()) + 1;
    const EvalRecord& first = prompt.front();
    const EvalRecord& last = prompt.back();
    const std::string& label = labels[prompt.size() - 1];
    if (last.task_file != first.task_file || last.line != first.line || last.setting != label) {
      throw Error(fmt::format("{}: expected the record of {}:{} and {}, found that of {}:{} and {}",
                              where, first.task_file, first.line, label, last.task_file, last.line,
                              last.setting));
    }
    if (prompt.size() < labels.size()) continue;
    if (!prompts.emplace(first.task_file, first.line).second) {
      throw Error(
          fmt::format("{}: prompt {}:{} has two records", where, first.task_file, first.line));
    }
    for (EvalRecord& record : prompt) take(std::move(record));
    prompt.clear();
    whole = position;
  }
  // If reading failed, the reader has thrown: an unreadable line must not be cut off.
  struct stat status = {};
  if (::fstat(m_descriptor, &status) != 0) throw files::system_error(file.string(), errno);
  const std::int64_t torn = status.st_size - whole;
  m_size = whole;
  if (torn > 0) cut(whole);
  return torn;
}

void EvaluationFolder::cut(std::int64_t size) const {
  if (::ftruncate(m_descriptor, size) != 0) {
    throw files::system_error(records_file().string() + ": the incomplete end cannot be cut off",
                              errno);
  }
}

void EvaluationFolder::append(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) {
    text += line;
    text += '\n';
  }
  try {
    files::write_fully(m_descriptor, text.data(), static_cast<std::int64_t>(text.size()), m_size);
    files::bring_to_disk(m_descriptor);
  } catch (const Error& error) {
    // If this fails too, the next run cuts the lines off.
    [[maybe_unused]] const int ignored = ::ftruncate(m_descriptor, m_size);
    throw Error(fmt::format("{}: {}; its records are complete, and the same command continues",
                            records_file().string(), error.what()));
  }
  m_size += static_cast<std::int64_t>(text.size());
}

}  // namespace kvzap::eval
