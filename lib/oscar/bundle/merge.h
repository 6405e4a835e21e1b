// Bundles out of bundles: the statistics of several runs added.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "oscar/bundle/bundle.h"

namespace oscar {

// What of `search` (SCHEMA.md) stays true of a file's statistics once the choices are gone: how
// much of /corpus is in no sum, and what decided which chunks these are. Null when all of it is.
Json held_back_part(const Bundle& bundle);

// Throws Error naming the file, `name`, when it holds no statistics.
void require_statistics(const Bundle& bundle, const std::string& name);

// Throws Error naming the first attribute of /model that differs; the model's name, a label, may.
// `name` and `other_name` are the files.
void require_same_model(const Bundle& bundle, const Bundle& other, const std::string& name,
                        const std::string& other_name);

// Adds moments, sums and counts of files whose /model agrees; the result is a statistics file that
// lists all corpora. `names` are the files, for errors. Throws Error when a file has no statistics,
// models differ, or a corpus appears twice and `allow_repeats` is false. v_energy_moment, which
// belongs to one run, is dropped. tokens_sha256 becomes the hash over those of the inputs, in
// order. Parts that were held back add up; the text's fingerprint is that of all files, or none
// when a file has none. Whether the text was enough is not known of the whole.
Bundle merge_statistics(std::vector<Bundle> inputs, const std::vector<std::string>& names,
                        bool allow_repeats);

}  // namespace oscar
