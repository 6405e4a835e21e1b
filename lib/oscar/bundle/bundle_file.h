// Bundles into outputs that were opened before the work that makes them.
#pragma once

#include "oscar/base/atomic_file.h"
#include "oscar/bundle/bundle.h"

namespace oscar {

// Writes `bundle` into `file` and commits it. Its created_utc is kept; an empty one becomes now.
// Throws Error as write_bundle of bundle.h does, which writes through this.
void write_bundle(const Bundle& bundle, AtomicFile& file);

// Now, as files name the moment at which they were made: "2026-01-31T12:00:00Z". SOURCE_DATE_EPOCH
// (seconds) takes the place of the clock. Throws Error when it is no number.
std::string utc_now();

}  // namespace oscar
