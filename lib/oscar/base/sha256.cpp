// SHA-256 of byte streams, as lower-case hexadecimal. The one owner of libcrypto.
#include "oscar/base/sha256.h"

#include <openssl/evp.h>
#include <array>
#include <vector>

#include "oscar/base/error.h"
#include "oscar/base/files.h"

namespace oscar {

// SHA-256 through OpenSSL's EVP interface.

struct Sha256::State {
  EVP_MD_CTX* context = nullptr;
  State() : context(EVP_MD_CTX_new()) {
    if (context == nullptr || EVP_DigestInit_ex(context, EVP_sha256(), nullptr) != 1) {
      throw Error({.what = "libcrypto offers no SHA-256"});
    }
  }
  ~State() { EVP_MD_CTX_free(context); }
  State(const State&) = delete;
  State& operator=(const State&) = delete;
};

Sha256::Sha256() : state_(std::make_unique<State>()) {}
Sha256::~Sha256() = default;
Sha256::Sha256(Sha256&&) noexcept = default;
Sha256& Sha256::operator=(Sha256&&) noexcept = default;

void Sha256::update(const void* data, size_t bytes) {
  if (EVP_DigestUpdate(state_->context, data, bytes) != 1) throw Error({.what = "SHA-256 failed"});
}

std::string Sha256::finish() {
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  unsigned int length = 0;
  if (EVP_DigestFinal_ex(state_->context, digest.data(), &length) != 1) {
    throw Error({.what = "SHA-256 failed"});
  }
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (unsigned int i = 0; i < length; ++i) {
    text += kDigits[digest[i] >> 4];
    text += kDigits[digest[i] & 15];
  }
  return text;
}

std::string sha256_of(std::string_view bytes) {
  Sha256 digest;
  digest.update(bytes);
  return digest.finish();
}

std::string sha256_of_file(const std::filesystem::path& path) { return InputFile(path).sha256(); }

}  // namespace oscar
