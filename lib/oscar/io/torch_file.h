// Files of torch.save (.pt), read and written without torch.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "oscar/io/float_tensor.h"
#include "oscar/io/pickle.h"
#include "oscar/io/zip.h"

namespace oscar {

// A file that was read: values as pickled, tensors still in its bytes.
class TorchFile {
 public:
  // Reads the format of torch 1.6 and later. Throws Error naming the file for an older one, a
  // damaged archive, another byte order, or a pickle that holds more than data (pickle.h).
  static TorchFile open(const std::filesystem::path& path);

  const PickleNode& root() const { return *document_.root; }
  static bool is_tensor(const PickleNode& node);
  // Shape and values of a tensor in float32, float64, float16 or bfloat16. Throws Error naming the
  // file and `name` for another node, a view that leaves its storage, or a shape of more than
  // `most` values.
  FloatTensor tensor(const PickleNode& node, const std::string& name, int64_t most) const;

 private:
  std::string where_, folder_;
  ZipArchive archive_;
  PickleDocument document_;
};

// What a file to write holds.
struct TorchItem;
using TorchKey = std::variant<int64_t, std::string>;
using TorchDict = std::vector<TorchItem>;
struct TorchValue {
  std::variant<std::monostate, int64_t, std::string, FloatTensor, TorchDict> is;
};
struct TorchItem {
  TorchKey key;
  TorchValue value;
};

// Writes atomically what torch.load reads, weights_only or not. Equal values give equal bytes.
void write_torch_file(const std::filesystem::path& path, const TorchValue& value);

}  // namespace oscar
