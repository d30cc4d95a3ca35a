// Types of tokens in GGUF files.
#pragma once

#include <cstdint>

namespace kvzap::gguf {

/// Types of tokens, with their numbers in the file.
enum TokenType : std::int32_t { normal = 1, unknown, control, user_defined, unused, byte };

}  // namespace kvzap::gguf
