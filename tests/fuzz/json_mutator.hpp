// Changes JSON as a tree. Mutated byte by byte, nearly all of it is no JSON any more, and readers
// are never asked about anything else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t max_size);

namespace kvzap::fuzz {

/// The text with one to four of its values or keys changed, or nothing if it is no JSON.
std::string mutated_json(std::string_view text, unsigned seed);

/// LLVMFuzzerCustomMutator for inputs that are JSON up to the first NUL, or to their end.
std::size_t mutate_json_input(std::uint8_t* data, std::size_t size, std::size_t max_size,
                              unsigned seed);

}  // namespace kvzap::fuzz
