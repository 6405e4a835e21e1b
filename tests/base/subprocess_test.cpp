// Programs that are run: input, output, environment, and how they end.
#include "oscar/base/subprocess.h"

#include <gtest/gtest.h>
#include <cstdlib>

#include "oscar/base/error.h"

namespace {

using namespace oscar;

TEST(RunProgram, GivesAllOfTheInputAndTakesAllOfTheOutput) {
  std::string input(size_t{3} << 20, 'x');  // more than any pipe holds
  input += "\nend\n";
  const ProgramResult result = run_program({"cat"}, input);
  EXPECT_EQ(result.status, 0);
  EXPECT_EQ(result.out, input);
  EXPECT_EQ(result.err, "");
}

TEST(RunProgram, SaysHowTheProgramEnded) {
  const ProgramResult failed = run_program({"sh", "-c", "echo why >&2; exit 3"}, "");
  EXPECT_EQ(failed.status, 3);
  EXPECT_EQ(failed.err, "why\n");
  EXPECT_EQ(run_program({"sh", "-c", "kill -9 $$"}, "").status, 128 + 9);
}

TEST(RunProgram, KeepsTheEndOfMuchThatIsSaidOnStandardError) {
  const ProgramResult result = run_program(
      {"sh", "-c", "i=0; while [ $i -lt 20000 ]; do echo line $i; i=$((i+1)); done >&2"}, "");
  EXPECT_EQ(result.err.size(), size_t{1} << 16);
  EXPECT_TRUE(result.err.ends_with("line 19999\n"));
}

TEST(RunProgram, SetsVariablesInPlaceOfItsOwn) {
  ASSERT_EQ(::setenv("OSCAR_TEST_A", "old", 1), 0);
  ASSERT_EQ(::setenv("OSCAR_TEST_B", "kept", 1), 0);
  const ProgramResult result =
      run_program({"sh", "-c", "echo $OSCAR_TEST_A $OSCAR_TEST_B"}, "", {"OSCAR_TEST_A=new"});
  EXPECT_EQ(result.out, "new kept\n");
}

TEST(RunProgram, NamesAProgramThatIsNotThere) {
  try {
    run_program({"/nowhere/python"}, "");
    ADD_FAILURE() << "was run";
  } catch (const Error& error) {
    EXPECT_EQ(error.info().where, "/nowhere/python");
    EXPECT_EQ(error.info().found, "No such file or directory");
  }
}

}  // namespace
