// SHA-256 of byte streams, as lower-case hexadecimal. The one owner of libcrypto.
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

namespace oscar {

// SHA-256 of byte streams, as lower-case hexadecimal. The one owner of libcrypto.

class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(Sha256&&) noexcept;
  Sha256& operator=(Sha256&&) noexcept;

  void update(const void* data, size_t bytes);
  void update(std::string_view text) { update(text.data(), text.size()); }
  // Ends the digest: 64 hexadecimal characters. The object must not be used afterwards.
  std::string finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

std::string sha256_of(std::string_view bytes);
// Throws Error when the file cannot be read.
std::string sha256_of_file(const std::filesystem::path& path);

}  // namespace oscar
