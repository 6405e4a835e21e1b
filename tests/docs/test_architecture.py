"""docs/architecture.md is that of the code: its layers, its drawing and its walks."""
import re
import sys
import unittest

from support.markdown_files import MarkdownFile
from support.programs import SOURCE

sys.path.insert(0, str(SOURCE / "scripts"))
import check_layers

MOST_STOPS = 14


class Architecture(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.file = MarkdownFile("docs/architecture.md")

    def section(self, heading):
        return self.file.text.partition(f"\n{heading}\n")[2].partition("\n## ")[0]

    def test_the_table_lists_the_layers_in_their_order(self):
        layers = re.findall(r"^\| `([\w/]+)` \|", self.section("## Layers"), re.MULTILINE)
        self.assertEqual(tuple(layers), check_layers.LAYERS)

    def test_what_runs_the_model_knows_neither_bundles_nor_statistics(self):
        """Nor includes it them through others: what they need of memory is stated to it."""
        lib = SOURCE / "lib"
        pending = [path.relative_to(lib).as_posix() for path in (lib / "oscar" / "model").iterdir()
                   if path.suffix in check_layers.SUFFIXES]
        came_from = dict.fromkeys(pending)
        while pending:
            path = pending.pop()
            for name in check_layers.includes(lib / path):
                if name.startswith("oscar/") and (lib / name).exists() and name not in came_from:
                    came_from[name] = path
                    pending.append(name)
        allowed = {"oscar/fit/linalg.h"}  # matrices
        self.assertEqual({name: came_from[name] for name in sorted(came_from) if name not in allowed
                          and name.startswith(("oscar/bundle/", "oscar/fit/", "oscar/eval/"))}, {})

    def test_no_arrow_of_the_drawing_goes_up(self):
        (drawing,) = [block for block in self.file.blocks() if block.language == "mermaid"]
        lines = drawing.text.splitlines()
        self.assertEqual(lines[0], "flowchart TD")
        nodes = [found[1] for line in lines if (found := re.match(r"  (\w+)[\[(]", line))]
        arrows = [found.groups() for line in lines
                  if (found := re.fullmatch(r"  (\w+) --(?: \w+ --)?> (\w+)", line))]
        self.assertEqual(len(nodes) + len(arrows) + 1, len(lines))
        self.assertEqual({node for arrow in arrows for node in arrow}, set(nodes))
        for begin, end in arrows:  # what an arrow comes from is named before what it leads to
            self.assertLess(nodes.index(begin), nodes.index(end), f"{begin} --> {end}")

    def test_what_the_drawing_names_are_folders(self):
        outside = {"corpus", "folder"}
        (drawing,) = [block for block in self.file.blocks() if block.language == "mermaid"]
        for name in re.findall(r"^  (\w+)[\[(]", drawing.text, re.MULTILINE):
            self.assertTrue(name in outside or any(name in layer.split("/") for layer in check_layers.LAYERS), name)

    def test_walks_are_short_and_every_stop_names_a_function(self):
        walks = re.split(r"^### ", self.section("## Four walks"), flags=re.MULTILINE)[1:]
        self.assertEqual(len(walks), 4)
        for walk in walks:
            title, *lines = walk.strip().splitlines()
            stops = [line for line in lines if re.match(r"\d", line)]
            self.assertLessEqual(len(stops), MOST_STOPS, title)
            for number, stop in enumerate(stops, 1):
                found = re.match(rf"{number}\. `([\w/.]+):(\w+)` \S", stop)
                self.assertTrue(found, stop)
                top = SOURCE if found[1].startswith(("python/", "kernels/")) else SOURCE / "lib/oscar"
                begins = r"def " if found[1].endswith(".py") else r"(?m)^(?! *//)(?!.*\breturn\b)(?!.* = )(?!.*;$).*\b"
                self.assertRegex((top / found[1]).read_text(), rf"{begins}{found[2]}\(|struct {found[2]}\b", stop)


if __name__ == "__main__":
    unittest.main()
