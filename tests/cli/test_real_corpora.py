"""The pinned real text: how it is split, and that it is fetched as pinned or not at all. No network."""
import hashlib
import io
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tarfile
import unittest

from support.markdown_files import MarkdownFile
from support.programs import SOURCE, ProgramTest

sys.path.insert(0, str(SOURCE / "datasets/real-text/make"))
import split_corpora

PINS = pathlib.Path("datasets/real-text")
# A build system of each kind; neither is installed where the stand-ins are needed.
BACKENDS = {"flask": "flit_core.buildapi", "werkzeug": "flit_core.buildapi",
            "sphinx": "flit_core.buildapi"}


def words(seed, count):
    """Text that shares no run of words with that of another seed."""
    draw = random.Random(seed)
    return " ".join("".join(draw.choices("abcdefghij", k=5)) for _ in range(count)) + "\n"


def pins():
    """(name, version) of each source distribution that is fetched, with its line."""
    lines = (SOURCE / PINS / "requirements.txt").read_text().splitlines()
    return {tuple(line.split()[0].split("==")): line for line in lines if not line.startswith("#")}


def member_of(pattern, number):
    """A path that the pattern matches; the pattern itself where it names one file."""
    return pattern.replace("*", f"part/file{number:02}")


def write_archives(folder):
    """Source distributions with the pinned names and little text in the places that are read."""
    folder.mkdir()
    for name, version in pins():
        root = f"{name}-{version}"
        files = {"PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
                 "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = '
                                   f'"{BACKENDS.get(name, "setuptools.build_meta")}"\n'}
        for archive, pattern in (place for places in split_corpora.DOMAINS.values() for place in places):
            if archive == f"{root}.tar.gz":
                for number in range(12 if "*" in pattern else 1):
                    files[member_of(pattern, number)] = words(f"{pattern}{root}{number}", 800)
        with tarfile.open(folder / f"{root}.tar.gz", "w:gz") as file:
            for path, text in files.items():
                data = text.encode()
                member = tarfile.TarInfo(f"{root}/{path}")
                member.size = len(data)
                file.addfile(member, io.BytesIO(data))


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Split(unittest.TestCase):
    def test_every_document_is_whole_and_in_one_part(self):
        found = [(f"name{i}", words(i, 400 + 40 * i)) for i in range(40)]
        parts, left_out = split_corpora.split(found, set())
        self.assertEqual(left_out, 0)
        self.assertEqual(sorted(sum(parts.values(), [])), sorted(found))
        total = sum(len(text) for _, text in found)
        for part, share in split_corpora.SHARES.items():
            self.assertAlmostEqual(sum(len(text) for _, text in parts[part]) / total, share / 100,
                                   delta=0.05)

    def test_a_near_duplicate_is_left_out_whichever_part_has_the_first(self):
        first = words(1, 400)
        near = " ".join(first.split()[:100]) + " " + words(2, 300)  # a quarter is the first's
        other = " ".join(first.split()[:20]) + " " + words(3, 380)  # 8 runs of 388 are
        parts, left_out = split_corpora.split([("a", first), ("b", near), ("c", other)], set())
        self.assertEqual(left_out, 1)
        self.assertEqual({name for name, _ in sum(parts.values(), [])}, {"a", "c"})

    def test_the_tables_of_the_documentation_name_what_is_pinned(self):
        sums = [line.split()[1] for line in (SOURCE / PINS / "SHA256SUMS").read_text().splitlines()]
        self.assertEqual(sorted(sums), sorted(f"{domain}-{part}.jsonl" for domain in split_corpora.DOMAINS
                                              for part in split_corpora.SHARES))
        readme = MarkdownFile(str(PINS / "README.md")).text
        for name in sums:
            self.assertIn(f"| `{name.removesuffix('.jsonl')}` |", readme)
        for name, version in pins():
            self.assertIn(f"{name} {version}", readme.lower())
        archives = {archive for places in split_corpora.DOMAINS.values() for archive, _ in places}
        self.assertEqual(archives, {f"{name}-{version}.tar.gz" for name, version in pins()})


class Fetch(ProgramTest):
    """python -m oscar_int2 fetch corpora in a copy of the repository, from archives in a folder."""

    def setUp(self):
        super().setUp()
        self.root = self.folder / "repository"
        # The whole package: what the command imports is beside it, and nothing else is needed.
        shutil.copytree(SOURCE / "python", self.root / "python", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(SOURCE / PINS / "make", self.root / PINS / "make")
        (self.root / ".setup.env").write_text(f"OSCAR_PYTHON='{sys.executable}'\n")
        self.archives = self.folder / "archives"
        write_archives(self.archives)
        (self.root / PINS / "requirements.txt").write_text("".join(
            f"{name}=={version} --hash=sha256:{sha256(self.archives / f'{name}-{version}.tar.gz')}\n"
            for name, version in pins()))
        self.parts = self.folder / "parts"
        self.parts.mkdir()
        split_corpora.main([str(self.archives), str(self.parts)])
        self.pin([f"{sha256(path)}  {path.name}" for path in sorted(self.parts.iterdir())])

    def pin(self, lines):
        (self.root / PINS / "SHA256SUMS").write_text("\n".join(lines) + "\n")

    def fetch(self):
        environment = os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.archives),
                                    "PYTHONPATH": str(self.root / "python")}
        return subprocess.run([sys.executable, "-m", "oscar_int2", "fetch", "corpora"], env=environment,
                              capture_output=True, text=True)

    def corpora(self):
        return sorted(path.name for path in (self.root / "corpora").iterdir())

    def test_pinned_text_is_fetched_once(self):
        result = self.fetch()
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(self.corpora(), sorted(path.name for path in self.parts.iterdir()))
        for path in self.parts.iterdir():
            self.assertEqual(path.read_bytes(), (self.root / "corpora" / path.name).read_bytes())
        seen = set()
        for path in self.parts.iterdir():
            names = {json.loads(line)["source"] for line in path.read_text().splitlines()}
            self.assertFalse(names & seen)
            seen |= names
        shutil.rmtree(self.archives)
        again = self.fetch()
        self.assertEqual((again.returncode, again.stdout), (0, "corpora: they are there\n"))

    def test_an_archive_other_than_the_pinned_one_is_refused(self):
        archive = next(self.archives.iterdir())
        archive.write_bytes(archive.read_bytes() + b"\0")
        result = self.fetch()
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("hash", result.stderr.lower())
        self.assertEqual(self.corpora(), [])

    def test_parts_other_than_the_pinned_ones_are_refused(self):
        self.pin(["0" * 64 + f"  {path.name}" for path in sorted(self.parts.iterdir())])
        result = self.fetch()
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("not the pinned ones", result.stderr)
        self.assertEqual(self.corpora(), [])


class Quickstart(unittest.TestCase):
    def test_an_argument_it_does_not_know_changes_nothing(self):
        for arguments in (["--fake"], ["--real", "now"], ["tiny-gqa"]):
            result = subprocess.run([SOURCE / "scripts/quickstart.sh", *arguments], capture_output=True,
                                    text=True, timeout=60)
            self.assertEqual(result.returncode, 2)
            self.assertIn("quickstart.sh --real", result.stdout)
            self.assertNotIn("setup:", result.stdout)


if __name__ == "__main__":
    unittest.main()
