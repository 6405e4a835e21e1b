// The printable character that byte-level BPE writes for each byte (Radford et al., GPT-2).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace oscar {

// The character of `byte`: itself when printable in Latin-1, otherwise the next free one from
// U+0100 on, in byte order.
char32_t character_of_byte(uint8_t byte);

// Every byte of `bytes` as its character.
std::string characters_of_bytes(std::string_view bytes);

// Bytes that valid UTF-8 `text` stands for, or nothing when a character stands for no byte.
std::optional<std::string> bytes_of_characters(std::string_view text);

}  // namespace oscar
