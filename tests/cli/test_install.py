"""An installed prefix works wherever it is moved to: programs, datasets and find_package(oscar)."""
import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

from support.programs import BIN, SOURCE

CMAKE = os.environ["OSCAR_CMAKE"]
BUNDLE = SOURCE / "rotation_zoo" / "tiny-gqa" / "tiny-gqa.h5"
PROJECT = """
cmake_minimum_required(VERSION 3.26)
project(reader CXX)
set(CMAKE_CXX_STANDARD 20)
find_package(oscar REQUIRED)
add_executable(reader reader.cpp)
target_link_libraries(reader PRIVATE oscar::oscar_core)
"""
READER = """
#include <cstdio>
#include "oscar/bundle/bundle.h"
int main(int, char** arguments) {
  std::printf("%zu layers", oscar::read_bundle(arguments[1]).layers.size());
}
"""


def run(*command):
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)


class Install(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        scratch = tempfile.TemporaryDirectory()
        cls.addClassCleanup(scratch.cleanup)
        cls.folder = pathlib.Path(scratch.name)
        done = run(CMAKE, "--install", BIN.parent, "--prefix", cls.folder / "first")
        assert done.returncode == 0, done.stderr
        cls.prefix = (cls.folder / "first").rename(cls.folder / "second")

    def succeed(self, *command):
        result = run(*command)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return result.stdout

    def test_programs_find_the_datasets_beside_them(self):
        datasets = self.prefix / "share" / "oscar" / "datasets"
        self.assertTrue((datasets / "needle" / "tasks.json").exists())
        shutil.copytree(datasets / "tiny-gqa", datasets / "only-here")
        text = self.folder / "text.txt"
        text.write_text("a few words of no importance " * 200)
        self.succeed(self.prefix / "bin" / "oscar-calibrate", "only-here", text,
                     self.folder / "out.h5", "--device", "cpu", "--dry-run")
        self.assertIn("is sound", self.succeed(self.prefix / "bin" / "oscar-bundle", "verify",
                                               BUNDLE))

    def test_the_licence_comes_with_it(self):
        licence = self.prefix / "share" / "oscar" / "LICENSE"
        self.assertEqual(licence.read_bytes(), (SOURCE / "LICENSE").read_bytes())
        self.assertTrue((licence.parent / "THIRD_PARTY_NOTICES.md").exists())

    def test_man_pages_and_completion_are_made_from_the_options(self):
        for program, words in (("oscar-calibrate", ("\\-\\-max\\-tokens", ".SS Corpus")),
                               ("oscar-bundle", (".SH oscar\\-bundle inspect",))):
            page = (self.prefix / "share" / "man" / "man1" / f"{program}.1").read_text()
            for word in words:
                self.assertIn(word, page)
        completion = self.prefix / "share" / "bash-completion" / "completions" / "oscar-calibrate"
        self.assertEqual(self.succeed("bash", "-c", f"""
            source {completion}
            COMP_WORDS=(oscar-calibrate --search of) COMP_CWORD=2; _oscar_calibrate
            echo "${{COMPREPLY[@]}}"
            COMP_WORDS=(oscar-calibrate --max-t) COMP_CWORD=1; _oscar_calibrate
            echo "${{COMPREPLY[@]}}" """), "off\n--max-tokens\n")

    def test_another_project_finds_and_links_the_library(self):
        project = self.folder / "project"
        project.mkdir()
        (project / "CMakeLists.txt").write_text(PROJECT)
        (project / "reader.cpp").write_text(READER)
        options = [f"-DCMAKE_PREFIX_PATH={self.prefix}"]
        if os.environ.get("CUDACXX"):
            toolkit = pathlib.Path(os.environ["CUDACXX"]).parent.parent
            options.append(f"-DCUDAToolkit_ROOT={toolkit}")
        self.succeed(CMAKE, "-S", project, "-B", project / "build", *options)
        self.succeed(CMAKE, "--build", project / "build")
        self.assertEqual(self.succeed(project / "build" / "reader", BUNDLE), "8 layers")


if __name__ == "__main__":
    unittest.main()
