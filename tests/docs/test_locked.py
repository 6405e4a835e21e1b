"""What scripts install from PyPI is pinned: by version and sha256, the same wherever it is shared."""
import re
import unittest

from support.programs import SOURCE

SCRIPTS = SOURCE / "scripts"
LOCKED = SCRIPTS / "locked"
COMMANDS = SOURCE / "python" / "oscar_int2" / "commands"
LOCK = (LOCKED / "uv.lock").read_text()
GROUPS = (LOCKED / "pyproject.toml").read_text().split("[dependency-groups]")[1].split("[tool.uv]")[0]
INSTALLS = re.compile(r'\bpip (?:install|download)\b(?:[^\n\\]|\\\n)*|"pip", "(?:install|download)"[^\]]*')


def locked_versions():
    """{name: versions}"""
    found = {}
    for name, version in re.findall(r'^name = "(.+)"\nversion = "(.+)"', LOCK, re.MULTILINE):
        found.setdefault(name, set()).add(version)
    return found


class Locked(unittest.TestCase):
    def test_each_file_is_locked_by_its_hash_and_comes_from_pypi_itself(self):
        files = re.findall(r'\{ url = "(.*?)"(.*?)\}', LOCK)
        self.assertGreater(len(files), 1000)
        for url, rest in files:
            self.assertTrue(url.startswith("https://files.pythonhosted.org/"), url)
            self.assertRegex(rest, r'hash = "sha256:[0-9a-f]{64}"', url)
        # A mirror's address would be of one machine alone.
        self.assertEqual(set(re.findall(r'registry = "(.*?)"', LOCK)), {"https://pypi.org/simple"})

    def test_what_is_asked_for_is_locked_in_the_version_asked_for(self):
        locked, asked = locked_versions(), re.findall(r'"([a-z][\w-]*)(?:==([\d.]+))?(?:[;>].*?)?"', GROUPS)
        self.assertGreater(len(asked), 15)
        for name, version in asked:
            with self.subTest(name=name):
                self.assertIn(version or next(iter(locked[name])), locked[name])

    def test_the_uv_that_pip_installs_is_the_locked_one(self):
        lines = (LOCKED / "uv.txt").read_text()
        version, = locked_versions()["uv"]
        self.assertTrue(lines.startswith(f"uv=={version} "), lines)
        hashes = re.findall(r"--hash=sha256:([0-9a-f]{64})", lines)
        self.assertGreater(len(hashes), 1)
        for digest in hashes:
            self.assertIn(digest, LOCK)

    def test_scripts_install_with_hashes_only(self):
        # By scripts/install.sh; what else asks pip for a file names its hash.
        for file in sorted((*SCRIPTS.glob("*.sh"), *SCRIPTS.glob("*.py"), *COMMANDS.glob("*.py"))):
            with self.subTest(file=file.name):
                for command in INSTALLS.findall(file.read_text()):
                    self.assertRegex(command, r'"\$\{locked\[@\]\}"|"--require-hashes"')
        script = (SCRIPTS / "install.sh").read_text()
        self.assertIn("\nlocked=(-q --no-deps --require-hashes --only-binary :all:)\n", script)
        self.assertIn("\npip=(-m pip --disable-pip-version-check install \"${locked[@]}\")\n", script)


if __name__ == "__main__":
    unittest.main()
