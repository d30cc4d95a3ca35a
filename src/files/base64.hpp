// Bytes as text of 64 characters (RFC 4648).
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace kvzap::files {

/// Returns the bytes of a text in base64, with or without padding; nothing for another text.
std::optional<std::string> from_base64(std::string_view text);

/// Returns bytes in base64, with padding.
std::string to_base64(std::string_view bytes);

}  // namespace kvzap::files
