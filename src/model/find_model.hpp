// Finds models and surrogates where people keep them: in files, folders and the cache of the hub.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace kvzap::model {

/// Returns the folder or GGUF file that `name` means. Understands
/// - "~" and "~/…": the home folder;
/// - config.json, a *.safetensors file or its index, or another file beside a config.json: their
///   folder;
/// - a folder without config.json that holds one model as GGUF (split or not): that file;
/// - a folder of the hub's cache (models--OWNER--NAME): its snapshot, refs/main first;
/// - OWNER/NAME that is no path here, or its address: its snapshot in the hub's cache
/// (HF_HUB_CACHE,
///   HF_HOME), or the cached model's folder if it lacks the snapshot.
/// Returns any other name unchanged. Never throws Error: the reader of the model reports what is
/// wrong with the result.
std::string find_model(const std::string& name);

/// Returns a name with the home folder in place of ~, unless a file of that name exists.
std::string with_home(const std::string& name);

/// Returns whether a folder holds a KVzap surrogate.
bool is_surrogate(const std::filesystem::path& folder);

/// Returns whether a name has ollama's form, such as qwen3:8b.
bool is_ollama_name(const std::string& name);
/// Returns how to find the file of such a model.
std::string ollama_hint(const std::string& name);

/// Returns the command that downloads a model of the hub: OWNER/NAME, OWNER/NAME:Q4_K_M as
/// llama.cpp names a file of it, or an address. `folder`: where to; default: folder_of_download.
std::string download_call(const std::string& name, const std::string& folder = "");
std::string folder_of_download(const std::string& name);

/// Returns advice for a name that is no file here but looks like a name on the Hugging Face hub,
/// preceded by ". "; else an empty string.
std::string hub_hint(const std::string& name);
/// Returns that advice for the name of a model: also for ollama's names and single words.
std::string name_hint(const std::string& name);

/// Returns "; …" if files in the folder show that a download has not finished, else "".
std::string download_hint(const std::filesystem::path& folder);

/// Returns the GGUF files in a folder that may hold a model: the first part of a split file stands
/// for all of it, and projectors of images (mmproj*) are left out. Sorted.
std::vector<std::filesystem::path> gguf_files(const std::filesystem::path& folder);

}  // namespace kvzap::model
