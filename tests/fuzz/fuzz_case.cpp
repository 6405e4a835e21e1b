// The entry point of libFuzzer, and the count of the heap in use.
#include "fuzz_case.h"

#include <sanitizer/allocator_interface.h>
#include <sanitizer/common_interface_defs.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>

// Read by LeakSanitizer: HDF5 1.10 keeps buffers of files in lists of its own.
extern "C" const char* __lsan_default_suppressions() { return "leak:libhdf5_serial.so\n"; }

namespace oscar::fuzz {
namespace {

// Of the run in progress. Blocks from before it may be freed in it: the count can be negative.
int64_t live_bytes = 0, most_bytes = 0;
bool counting = false;

bool may_end = false;  // of a child process: its end is no finding
constexpr size_t kMostOfAChild = size_t{128} << 20;

void finding(const char* what) {
  if (may_end) ::_exit(1);
  counting = false;
  std::fprintf(stderr, "finding: %s\n", what);
  __sanitizer_print_stack_trace();
  std::abort();
}

void on_malloc(const volatile void*, size_t bytes) {
  if (may_end && bytes > kMostOfAChild) ::_exit(1);
  if (!counting) return;
  live_bytes += static_cast<int64_t>(bytes);
  if (live_bytes > most_bytes) finding("more memory than the size of the input allows for");
}

void on_free(const volatile void* block) {
  if (!counting || block == nullptr) return;
  live_bytes -=
      static_cast<int64_t>(__sanitizer_get_allocated_size(const_cast<const void*>(block)));
}

struct Scratch {
  std::filesystem::path path;
  pid_t owner = ::getpid();
  Scratch() {
    const std::filesystem::path memory = "/dev/shm";
    const auto parent =
        ::access(memory.c_str(), W_OK) == 0 ? memory : std::filesystem::temp_directory_path();
    std::string name = parent / "oscar-fuzz-XXXXXX";
    if (::mkdtemp(name.data()) == nullptr) std::abort();
    path = name;
  }
  ~Scratch() {
    std::error_code ignored;
    if (::getpid() == owner) std::filesystem::remove_all(path, ignored);
  }
};

}  // namespace

void require(bool holds, const char* what) {
  if (!holds) finding(what);
}

void end_without_findings() {
  counting = false;
  may_end = true;
  __sanitizer_set_death_callback([] {});
}

const std::filesystem::path& scratch_folder() {
  static const Scratch folder;
  return folder.path;
}

std::filesystem::path scratch_file(const std::string& name, std::string_view bytes) {
  auto path = scratch_folder() / name;
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  file.close();
  if (!file) std::abort();
  return path;
}

bool same_bits(const FloatTensors& a, const FloatTensors& b) {
  const auto same = [](const auto& x, const auto& y) {
    const auto& [name, one] = x;
    const auto& [other_name, other] = y;
    return name == other_name && one.shape == other.shape &&
           one.values.size() == other.values.size() &&
           (one.values.empty() || std::memcmp(one.values.data(), other.values.data(),
                                              one.values.size() * sizeof(float)) == 0);
  };
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), same);
}

std::pair<std::string_view, std::string_view> cut_at_nul(std::string_view bytes) {
  const size_t nul = bytes.find('\0');
  if (nul == std::string_view::npos) return {bytes, {}};
  return {bytes.substr(0, nul), bytes.substr(nul + 1)};
}

}  // namespace oscar::fuzz

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  using namespace oscar::fuzz;
  ::setenv("SOURCE_DATE_EPOCH", "1700000000", 1);
  require(__sanitizer_install_malloc_and_free_hooks(on_malloc, on_free) != 0,
          "the heap cannot be watched");
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace oscar::fuzz;
  live_bytes = 0;
  most_bytes = static_cast<int64_t>(kMemoryBound.fixed + kMemoryBound.per_byte * size);
  counting = true;
  try {
    read_untrusted({reinterpret_cast<const char*>(data), size});
  } catch (const oscar::Error&) {  // NOLINT(bugprone-empty-catch): the answer to bad input
  }
  counting = false;
  return 0;
}
