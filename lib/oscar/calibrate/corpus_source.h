// Token chunks for a run: read from files, or written by the model itself.
#pragma once

#include "oscar/base/progress.h"
#include "oscar/calibrate/options.h"
#include "oscar/data/corpus.h"
#include "oscar/model/transformer.h"

namespace oscar {

// `chunk_len` resolved. self:N needs all weights on the device: throws Error with the way out (ids
// made beforehand) when they do not fit `device_bytes`.
TokenChunks make_chunks(const CalibrateOptions& options, int chunk_len,
                        const Checkpoint& checkpoint, Transformer& model, int64_t device_bytes,
                        Progress& progress);

}  // namespace oscar
