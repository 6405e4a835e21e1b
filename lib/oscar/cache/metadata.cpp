// Names of the metadata dtypes.
#include "oscar/cache/metadata.h"

namespace oscar {

const char* metadata_name(MetadataDtype dtype) {
  switch (dtype) {
    case MetadataDtype::kBf16:
      return "bf16";
    case MetadataDtype::kFp32:
      return "fp32";
    case MetadataDtype::kFp16:
      break;
  }
  return "fp16";
}

bool parse_metadata_name(const std::string& name, MetadataDtype& dtype) {
  for (const MetadataDtype known :
       {MetadataDtype::kFp16, MetadataDtype::kBf16, MetadataDtype::kFp32}) {
    if (name == metadata_name(known)) {
      dtype = known;
      return true;
    }
  }
  return false;
}

}  // namespace oscar
