// Both directions of the byte alphabet as small tables.
#include "oscar/data/byte_alphabet.h"

#include <array>

#include "oscar/data/unicode.h"

namespace oscar {
namespace {

constexpr int kCharacters = 256 + 68;  // 68 bytes have no printable character of their own

struct Alphabet {
  std::array<char32_t, 256> of_byte{};
  std::array<int, kCharacters> of_character{};  // -1: stands for no byte
};

constexpr bool is_printable(int byte) {
  return (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

constexpr Alphabet make_alphabet() {
  Alphabet alphabet;
  for (int& byte : alphabet.of_character) byte = -1;
  char32_t next = 256;
  for (int byte = 0; byte < 256; ++byte) {
    const char32_t character = is_printable(byte) ? static_cast<char32_t>(byte) : next++;
    alphabet.of_byte[static_cast<size_t>(byte)] = character;
    alphabet.of_character[character] = byte;
  }
  return alphabet;
}

constexpr Alphabet kAlphabet = make_alphabet();

}  // namespace

char32_t character_of_byte(uint8_t byte) { return kAlphabet.of_byte[byte]; }

std::string characters_of_bytes(std::string_view bytes) {
  std::string text;
  text.reserve(2 * bytes.size());
  for (const char byte : bytes)
    append_code_point(character_of_byte(static_cast<uint8_t>(byte)), text);
  return text;
}

std::optional<std::string> bytes_of_characters(std::string_view text) {
  std::string bytes;
  bytes.reserve(text.size());
  for (size_t offset = 0; offset < text.size();) {
    const char32_t character = next_code_point(text, offset);
    if (character >= kCharacters || kAlphabet.of_character[character] < 0) return std::nullopt;
    bytes += static_cast<char>(kAlphabet.of_character[character]);
  }
  return bytes;
}

}  // namespace oscar
