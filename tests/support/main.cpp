// The main of every test program: as gtest_main, but a run of which every test was skipped ends in
// kSkipped, by which CTest shows it as skipped and not as passed.
#include <gtest/gtest.h>

// Read by LeakSanitizer: HDF5 1.10 keeps buffers of files that it has flushed in lists of its own,
// and lets go of the lists at exit when many files were open in one process.
extern "C" const char* __lsan_default_suppressions() { return "leak:libhdf5_serial.so\n"; }

constexpr int kSkipped = 77;  // SKIP_RETURN_CODE in tests/CMakeLists.txt

int main(int count, char** arguments) {
  testing::InitGoogleTest(&count, arguments);
  const int failed = RUN_ALL_TESTS();
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  const bool none_ran =
      all.test_to_run_count() > 0 && all.skipped_test_count() == all.test_to_run_count();
  return failed == 0 && none_ran ? kSkipped : failed;
}
