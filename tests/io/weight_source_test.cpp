// Bytes that the system reads ahead are in its cache when they are asked for.
#include "oscar/io/weight_source.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>
#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "model/checkpoint/model_folder.h"

namespace {

using namespace oscar;
using namespace oscar_test;

// Pages of a file that are in memory.
size_t cached_pages(const MappedFile& file) {
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> state((file.size() + page - 1) / page);
  auto* const begin = const_cast<std::byte*>(file.data());
  EXPECT_EQ(::mincore(begin, file.size(), state.data()), 0);
  return static_cast<size_t>(
      std::ranges::count_if(state, [](unsigned char page_state) { return page_state & 1; }));
}

TEST(MappedFile, ReadsAheadWhatItIsToldTo) {
  TemporaryFolder folder;
  const auto path = folder.path() / "file";
  write_file(path, std::string(size_t{8} << 20, 'x'));
  const int descriptor = ::open(path.c_str(), O_RDONLY);
  ::fsync(descriptor);
  ::posix_fadvise(descriptor, 0, 0, POSIX_FADV_DONTNEED);
  ::close(descriptor);
  const MappedFile file(path);
  if (cached_pages(file) > 0) GTEST_SKIP() << "this file system keeps its files in memory";
  const auto wanted = (size_t{3} << 20) / static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  file.read_ahead(file.data() + (size_t{1} << 20), size_t{3} << 20);
  for (int tries = 0; cached_pages(file) < wanted && tries < 1000; ++tries) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_GE(cached_pages(file), wanted);
  EXPECT_LT(cached_pages(file), 2 * wanted) << "and nothing else";
}

}  // namespace
