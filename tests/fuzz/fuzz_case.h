// What the programs of libFuzzer share: the rules that every reader is held to.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <string_view>

#include "oscar/base/error.h"
#include "oscar/io/weight_source.h"

namespace oscar::fuzz {

// Memory that one run may hold at a time: a constant and so much for each byte of input.
struct MemoryBound {
  size_t fixed = size_t{1} << 20;
  size_t per_byte = 64;
};

// Each program defines these two. An Error from read_untrusted is the answer that bad input should
// get; any other exception, a failed require, more memory than the bound, and whatever sanitizers
// report are findings.
extern const MemoryBound kMemoryBound;
void read_untrusted(std::string_view bytes);

// Ends the program with `what`, as a finding, unless `holds`.
void require(bool holds, const char* what);

// Runs what must work on input that was accepted: an Error ends the program too.
template <typename Work>
auto must(const char* what, const Work& work) {
  try {
    return work();
  } catch (const Error& error) {
    require(false, (std::string(what) + ": " + error.what()).c_str());
    throw;
  }
}

// Runs what may refuse. Returns whether it did not.
template <typename Work>
bool accepted(const Work& work) {
  try {
    work();
  } catch (const Error&) {
    return false;
  }
  return true;
}

// For a child process, whose end is no finding, however it comes: its memory is not counted, but a
// block of over 128 MiB ends it, and nothing is left of its input.
void end_without_findings();

// A folder of this process, in memory where the system has such a place, removed at exit.
const std::filesystem::path& scratch_folder();
// Writes a file there, in place of the one before.
std::filesystem::path scratch_file(const std::string& name, std::string_view bytes);

// Equal names, shapes and bits: a NaN equals itself.
bool same_bits(const FloatTensors& a, const FloatTensors& b);

// Cuts `bytes` at the first NUL: what is before, and what is behind (empty when there is none).
std::pair<std::string_view, std::string_view> cut_at_nul(std::string_view bytes);

}  // namespace oscar::fuzz
