"""What scripts install from PyPI is pinned: by version and sha256, the same wherever it is shared."""
import re
import unittest

from support.programs import SOURCE

SCRIPTS = SOURCE / "scripts"
LOCKED = SCRIPTS / "locked"
COMMANDS = SOURCE / "python" / "oscar_int2" / "commands"
ENTRY = re.compile(r"^(?P<name>[\w.-]+)==(?P<version>\S+)(?: ; (?P<marker>.*?))? \\\n"
                   r"(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+", re.MULTILINE)
INSTALLS = re.compile(r'-m (?:uv )?pip (?:install|download)\b(?:[^\n\\]|\\\n)*|"pip", "(?:install|download)"[^\]]*')


def entries(file):
    return list(ENTRY.finditer(file.read_text()))


def asked_for(file):
    """(normalized name, pinned version or "") of each line of an .in file."""
    for line in file.read_text().splitlines():
        if not line.startswith(("#", "-c ")):
            name, version = re.fullmatch(r"([\w.-]+?)(?:==(\S+)|>=\S+)?", line).groups()
            yield re.sub("[-_.]+", "-", name).lower(), version or ""


class Locked(unittest.TestCase):
    def test_a_lock_file_is_nothing_but_versions_with_hashes(self):
        files = sorted(LOCKED.glob("*.txt"))
        self.assertGreater(len(files), 5)
        for file in files:
            with self.subTest(file=file.name):
                rest = ENTRY.sub("", file.read_text())
                self.assertEqual([line for line in rest.splitlines() if not line.startswith("#")], [])
                self.assertTrue(entries(file))
                self.assertNotIn("://", file.read_text())

    def test_what_is_asked_for_is_locked_in_the_version_asked_for(self):
        files = sorted(LOCKED.glob("*.in"))
        self.assertEqual([file.stem for file in files],
                         [file.stem for file in sorted(LOCKED.glob("*.txt"))])
        for file in files:
            locked = {}
            for entry in entries(file.with_suffix(".txt")):
                locked.setdefault(entry["name"], set()).add(entry["version"])
            for name, version in asked_for(file):
                with self.subTest(file=file.name, name=name):
                    self.assertIn(name, locked)
                    if version:
                        self.assertEqual(locked[name], {version})

    def test_lists_for_one_environment_agree(self):
        # Each is installed without what its packages ask for, so none may bring another version.
        versions = {}
        for name in ("build", "cuda", "torch", "tests", "bare"):
            for entry in entries(LOCKED / f"{name}.txt"):
                # A marker for Linux is no difference here.
                marker = re.sub(r"(?: and )?sys_platform == 'linux'", "", entry["marker"] or "")
                key = entry["name"], marker
                with self.subTest(file=name, name=key):
                    self.assertEqual(versions.setdefault(key, entry["version"]), entry["version"])

    def test_scripts_install_with_hashes_only(self):
        commands = []
        for file in sorted((*SCRIPTS.glob("*.sh"), *SCRIPTS.glob("*.py"), *COMMANDS.glob("*.py"))):
            for command in INSTALLS.findall(file.read_text()):
                commands.append(command)
                with self.subTest(file=file.name, command=command):
                    self.assertRegex(command, r"--require-hashes|\$\{locked\[@\]\}")
        self.assertGreater(len(commands), 5)
        for name in ("setup.sh", "setup_vllm.sh"):
            self.assertIn("\nlocked=(-q --no-deps --require-hashes --only-binary :all:)\n",
                          (SCRIPTS / name).read_text())


if __name__ == "__main__":
    unittest.main()
