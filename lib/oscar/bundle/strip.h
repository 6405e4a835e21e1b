// Bundles with less in them: to publish, or for a server.
#pragma once

#include <string>

#include "oscar/bundle/bundle.h"

namespace oscar {

enum class StripProfile {
  kPublish,  // all but statistics and the fingerprint of the text
  kServing,  // these and the portable variants left out: what this toolkit's own cache reads
};

// Throws Error naming the file, `name`, for a statistics file, which would be left empty.
Bundle strip_bundle(Bundle bundle, StripProfile profile, const std::string& name);

// The content_sha256 of a bundle's serving profile: equal for any two files whose rows are served
// alike and described alike, whatever else they hold.
std::string serving_sha256(const Bundle& bundle);

}  // namespace oscar
