// The server's description of itself: an OpenAPI document.
#pragma once

#include <kvzap/server/protocol.hpp>
#include <string>
#include <vector>

namespace kvzap::server {

/// A path of the server as a document names it.
struct OpenApiPath {
  std::string path;                  // "{name}" stands for a name at its end
  std::vector<std::string> methods;  // as "GET"
  bool needs_key = false;
  bool is_messages = false;  // errors have the form of Anthropic's protocol
};

/// Returns an OpenAPI 3.1 document of the paths, with the fields of request bodies, their limits
/// for `model`, and the replies. Throws Error for a path that it cannot describe.
std::string openapi_document(const ServedModel& model, const std::vector<OpenApiPath>& paths,
                             const std::string& version);

}  // namespace kvzap::server
