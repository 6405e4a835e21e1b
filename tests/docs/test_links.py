"""Links, anchors and paths in every Markdown file lead somewhere."""
import re
import unittest

from support.markdown_files import MarkdownFile, markdown_files, project_files
from support.programs import SOURCE

# External pages are not fetched: only these are linked, in this form.
EXTERNAL = re.compile(r"https://arxiv\.org/abs/\d{4}\.\d{5}")
TERMINAL_COLUMNS = 80
# A file's name without its folder is looked up when it is one that only this project would have.
SOURCE_SUFFIXES = {".h", ".cpp", ".cuh", ".cu", ".py", ".sh"}
FILE_SUFFIXES = SOURCE_SUFFIXES | {".md", ".json", ".jsonl", ".tsv", ".csv", ".h5", ".html", ".svg",
                                   ".txt"}
PATH = re.compile(r"[\w.*+-]+(/[\w.*+-]+)+/?")
PLACE = re.compile(r"([\w./-]+\.(?:h|cpp|cuh|cu|py)):([A-Za-z_][\w:]*)")
# Folders that paths in prose may start from, besides the root and the file's own folder.
STARTS = ("lib/oscar", "kernels")
NOT_HERE = {
    "llama.cpp": "the project of this name",
    "lib/python/oscar_int2": "where an installation has the torch operators",
    "random-8b/ids.npy": "written by the command beside it",
}


class Links(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.files = markdown_files()
        cls.names = {str(name) for name in project_files()}
        cls.folders = {str(parent) for name in project_files() for parent in name.parents}
        cls.top_folders = {name.parts[0] for name in project_files() if len(name.parts) > 1}
        cls.basenames = {name.name for name in project_files()}

    def exists(self, path, file):
        """Whether `path`, which may hold *, is one of the project's files or folders."""
        path = path.rstrip("/")
        for start in (SOURCE, file.folder, *(SOURCE / start for start in STARTS)):
            found = start.glob(path) if "*" in path else [start / path]
            for place in found:
                place = place.resolve()
                if not place.is_relative_to(SOURCE.resolve()):
                    continue
                name = str(place.relative_to(SOURCE.resolve()))
                if name in self.names or name in self.folders:
                    return True
        return False

    def test_the_files_are_found(self):
        names = {file.name for file in self.files}
        self.assertTrue({"README.md", "docs/README.md", "kernels/README.md"} <= names)

    def test_relative_links_and_anchors_exist(self):
        for file in self.files:
            for link in file.links():
                if "://" in link:
                    continue
                with self.subTest(f"{file.name}: {link}"):
                    path, _, anchor = link.partition("#")
                    target = (file.folder / path).resolve() if path else SOURCE / file.name
                    name = str(target.relative_to(SOURCE.resolve()))
                    self.assertTrue(name in self.names or name in self.folders)
                    if anchor:
                        self.assertIn(anchor, list(MarkdownFile(name).anchors()))

    def test_external_links_are_papers(self):
        for file in self.files:
            for link in file.links():
                if "://" in link:
                    with self.subTest(file.name):
                        self.assertRegex(link, f"^{EXTERNAL.pattern}$")

    def test_paths_in_backticks_exist(self):
        for file in self.files:
            for word in (word for span in file.code_spans() for word in span.split()):
                word = word.rstrip(".,:;")
                if word in NOT_HERE:
                    continue
                suffix = "." + word.rpartition(".")[2]
                if PATH.fullmatch(word):
                    looks = word.split("/")[0] in self.top_folders or suffix in FILE_SUFFIXES
                    if looks:
                        self.assertTrue(self.exists(word, file), f"{file.name}: {word}")
                elif suffix in SOURCE_SUFFIXES and re.fullmatch(r"\w+\.\w+", word):
                    self.assertTrue(word in self.basenames, f"{file.name}: {word}")

    def test_functions_named_with_their_file_are_in_it(self):
        for file in self.files:
            for span in file.code_spans():
                place = PLACE.fullmatch(span)
                if place is None:
                    continue
                with self.subTest(f"{file.name}: {span}"):
                    self.assertTrue(self.exists(place[1], file))
                    text = next(path for start in ("", *STARTS)
                                if (path := SOURCE / start / place[1]).exists()).read_text()
                    self.assertRegex(text, rf"\b{re.escape(place[2].split('::')[-1])}\b")

    def test_blocks_that_are_typed_or_printed_fit_a_terminal(self):
        for file in self.files:
            if file.name != "README.md" and file.folder != SOURCE / "docs":
                continue
            for block in file.blocks():
                long = [line for line in block.text.splitlines() if len(line) > TERMINAL_COLUMNS]
                self.assertTrue(block.language == "mermaid" or not long, f"{file.name}: {long}")

    def test_every_page_of_the_documentation_is_in_its_index(self):
        linked = set(MarkdownFile("docs/README.md").links())
        for file in self.files:
            if file.folder == SOURCE / "docs" and file.name != "docs/README.md":
                self.assertIn(file.name.rpartition("/")[2], linked)

    def test_rows_of_a_table_have_as_many_cells_as_its_head(self):
        for file in self.files:
            head = 0
            for line in file.prose().splitlines():
                cells = len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", line))) - 1
                if not line.startswith("|"):
                    head = 0
                elif head == 0:
                    head = cells
                else:
                    self.assertEqual(cells, head, f"{file.name}: {line}")


if __name__ == "__main__":
    unittest.main()
