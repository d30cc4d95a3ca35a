// The paths of the server.
#pragma once

#include <kvzap/server/openapi.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvzap::driver {

/// A path, or all paths that begin with it and end with a name.
struct Path {
  /// Methods of requests.
  enum class Methods { get, post, get_and_delete };

  std::string name;
  Methods methods = Methods::get;
  bool ends_with_name = false;
  /// The endpoint that answers prompts at this path.
  std::optional<server::Endpoint> endpoint = {};
  /// Clients need no key.
  bool is_open = false;

  bool posts() const { return methods == Methods::post; }
  /// Whether requests may have this method.
  bool takes(std::string_view method) const;
  /// Returns the value of the header Allow.
  const char* allowed() const;
  /// Returns the name at the end of a path.
  std::string name_in(const std::string& path) const { return path.substr(name.size()); }
};

// The name of a model may have slashes.
inline constexpr const char* one_model = "/v1/models/";
inline constexpr const char* one_response = "/v1/responses/";

/// Returns the path of a request, or null if there is none.
const Path* path_of(const std::string& path);
/// Returns all paths for the document of /openapi.json. `has_keys`: clients need a key.
std::vector<server::OpenApiPath> described_paths(bool has_keys);
/// Returns the error for a path that path_of does not know.
std::string unknown_path(const std::string& path);
/// Whether errors have the form of Anthropic's protocol at this path.
bool is_messages_path(const std::string& path);

}  // namespace kvzap::driver
