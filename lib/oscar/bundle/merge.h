// The statistics of several runs, added: what must agree, and what their files say of it.
#pragma once

#include <string>
#include <vector>

#include "oscar/base/json.h"
#include "oscar/bundle/bundle.h"

namespace oscar {

// Whether a layer of it has sums weighted by attention.
bool is_weighted(const Bundle& bundle);

// The windows with which these were collected.
Windows collected_windows(const Bundle& bundle);

// As options, of `windows` those that differ from `other`.
std::string differing(const Windows& windows, const Windows& other);

// What of `search` (SCHEMA.md) stays true of a file's statistics once the choices are gone: how
// much of /corpus is in no sum, and what decided which sequences these are. Null when all of it is.
Json held_back_part(const Bundle& bundle);

// Throws Error naming the file, `name`, when it holds no statistics.
void require_statistics(const Bundle& bundle, const std::string& name);

// Whether `merge` can tell its text from another's, by a hash.
bool names_its_text(const Bundle& bundle);

// Whether fingerprints or samples can say that two files are of the same weights. A model in memory
// may have neither.
bool have_comparable_weights(const Bundle& bundle, const Bundle& other);

// Throws Error naming the first attribute of /model that differs; the model's name, a label, may.
// Or the tensor whose weight_samples differ, where both files have them. `name` and `other_name`
// are the files.
void require_same_model(const Bundle& bundle, const Bundle& other, const std::string& name,
                        const std::string& other_name);

// Adds moments, sums and counts of files whose /model agrees; the result is a statistics file that
// lists all corpora. `names` are the files, for errors. Throws Error when a file has no statistics,
// models differ, sums weighted by attention were collected with different windows, or a corpus,
// most of a text by its fingerprint, or equal sums, appear twice and `allow_repeats` is false.
// v_energy_moment, which belongs to one run, is dropped; position_span is 0 where those of the
// inputs differ. tokens_sha256 becomes the hash over those of the inputs, in order. Parts that were
// held back add up; the text's fingerprint is that of all files, or none when a file has none.
// Whether the text was enough is not known of the whole.
Bundle merge_statistics(std::vector<Bundle> inputs, const std::vector<std::string>& names,
                        bool allow_repeats);

// What a user must hear of it: text that two files share, and sums by attention that some files
// lack and that the result therefore leaves out.
std::vector<std::string> merge_warnings(const std::vector<Bundle>& inputs,
                                        const std::vector<std::string>& names);

}  // namespace oscar
