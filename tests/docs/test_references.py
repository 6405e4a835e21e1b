"""docs/mathematics.md and the code cite each other truly: sections, files, names and constants."""
import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "mathematics.md"

# Who may cite a section, and what may implement one.
CITING = ("lib", "kernels", "apps", "tests", "scripts", "studies", "benchmarks", "docs", "datasets", "rotation_zoo")
IMPLEMENTING = ("lib", "kernels", "apps", "scripts", "studies", "benchmarks")
SUFFIXES = (".h", ".cpp", ".cuh", ".cu", ".inc", ".in", ".py", ".sh", ".md", ".txt", ".cmake")

HEADING = re.compile(r"^(##|###) (\d+(?:\.\d+)?)\.? (\S.*)$", re.MULTILINE)
NUMBERS = r"(\d+(?:\.\d+)*(?:(?:, | and )\d+(?:\.\d+)*)*)"
CITATION = re.compile(r"\(math " + NUMBERS + r"\)")
# What looks like a citation in another form: it would be overlooked.
MALFORMED = re.compile(r"\bMATH\b(?:\.md)?(?::| section|, section)|(?<!\()\bmath:? (?:section )?\d+\.\d"
                       r"|mathematics\.md,? (?:section )?\d")
INTERNAL = re.compile(r"\b(?:sections?|chapters?) " + NUMBERS + r"|\((\d+\.\d+)\)", re.IGNORECASE)
PATH = re.compile(r"`((?:" + "|".join((*CITING, "cmake")) + r")/[^`\s]+|[A-Z]+\.md)`")
IMPLEMENTED = re.compile(r"`((?:" + "|".join(IMPLEMENTING) + r")/[^`\s]+)`\s+\(([^()]*)\)")
CONSTANT = re.compile(r"^\| `(\w+)` \| `([^`]+)` \| `([^`]+)` \|", re.MULTILINE)


def sections(document):
    """Number -> text of every numbered section, chapters without that of their sections."""
    found = list(HEADING.finditer(document))
    ends = [heading.start() for heading in found[1:]] + [len(document)]
    return {heading[2]: document[heading.end():end] for heading, end in zip(found, ends)}


def each_number(listed):
    return re.split(r", | and ", listed)


def unwrapped(text):
    """Comments as one line each: a citation may be broken across two."""
    return re.sub(r"\s*\n[ \t]*(?://+|#+|\*|\"\"\")?[ \t]*", " ", text)


def citations(text):
    return [number for listed in CITATION.findall(unwrapped(text)) for number in each_number(listed)]


def malformed(text):
    return [match[0] for match in MALFORMED.finditer(unwrapped(text))]


def wrong_citations(text, known):
    return [number for number in citations(text) if number not in known] + malformed(text)


def files_below(folders):
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in SUFFIXES and path.is_file():
                yield path


def read(path):
    """The text of a file, or of all sources in a folder."""
    if path.is_dir():
        return "\n".join(p.read_text(encoding="utf-8") for p in sorted(path.rglob("*"))
                         if p.suffix in SUFFIXES)
    return path.read_text(encoding="utf-8")


def defines(source, name, value):
    """Whether `source` gives `name` this value, spaces, line breaks and comments aside."""
    code = re.sub(r"//[^\n]*", "", source)
    spelled = r"\s*".join(re.escape(character) for character in re.sub(r"\s+", "", value))
    return re.search(rf"\b{name}(?:\[\])?\s*=\s*{spelled}(?![\w.])", code) is not None


class Mathematics(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.document = DOCUMENT.read_text(encoding="utf-8")
        cls.sections = sections(cls.document)

    def test_sections_are_numbered_in_order_without_gaps(self):
        chapter, section = 0, 0
        for level, number, title in HEADING.findall(self.document):
            if level == "##":
                chapter, section = chapter + 1, 0
                self.assertEqual(number, str(chapter), title)
            else:
                section += 1
                self.assertEqual(number, f"{chapter}.{section}", title)
        self.assertEqual(len(re.findall(r"^#{2,} ", self.document, re.MULTILINE)), len(self.sections))
        contents = re.findall(r"^(\d+)\. \[(.*)\]\(", self.document.split("\n## ")[0], re.MULTILINE)
        titles = [(number, title) for level, number, title in HEADING.findall(self.document) if level == "##"]
        self.assertEqual(contents, titles)

    def test_every_section_that_code_cites_exists(self):
        for path in files_below(CITING):
            if path == pathlib.Path(__file__).resolve():
                continue
            with self.subTest(str(path.relative_to(ROOT))):
                text = path.read_text(encoding="utf-8")
                self.assertEqual(wrong_citations(text, self.sections), [])

    def test_every_section_that_the_document_refers_to_exists(self):
        for listed, alone in INTERNAL.findall(self.document):
            for number in each_number(listed or alone):
                self.assertIn(number, self.sections)

    def test_every_section_is_cited_or_names_what_implements_it(self):
        cited = {number for path in files_below(("lib", "kernels"))
                 for number in citations(path.read_text(encoding="utf-8"))}
        for number, text in self.sections.items():
            if f"{number}.1" in self.sections:
                continue  # a chapter: its sections say it
            named = [path for path in PATH.findall(text) if path.split("/")[0] in IMPLEMENTING]
            with self.subTest(section=number):
                self.assertTrue(named or number in cited, "belongs to no code")

    def test_every_file_that_is_named_exists(self):
        for path in PATH.findall(self.document):
            with self.subTest(path):
                self.assertTrue((ROOT / path).exists())

    def test_every_name_beside_a_file_is_in_it(self):
        pairs = IMPLEMENTED.findall(self.document)
        self.assertGreater(len(pairs), 20)
        for path, names in pairs:
            for name in re.split(r",\s+|::", names):
                with self.subTest(path, name=name):
                    self.assertRegex(read(ROOT / path), rf"\b{re.escape(name)}\b")

    def test_every_constant_has_the_value_that_is_said(self):
        rows = CONSTANT.findall(self.document)
        self.assertGreater(len(rows), 40)
        for name, value, path in rows:
            with self.subTest(path, constant=name):
                self.assertTrue(defines(read(ROOT / path), name, value), f"is not {value}")


class TheTestItself(unittest.TestCase):
    KNOWN = {"4": "", "4.2": "", "5.1": ""}

    def test_a_wrong_number_is_found(self):
        self.assertEqual(wrong_citations("// the index (math 4.2), the factor (math 5.1, 4)", self.KNOWN), [])
        self.assertEqual(wrong_citations("// the index (math 4.3)", self.KNOWN), ["4.3"])
        self.assertEqual(wrong_citations("// the factor (math 5.1 and 9)", self.KNOWN), ["9"])
        self.assertEqual(wrong_citations("// broken across lines (math\n  // 7.7)", self.KNOWN), ["7.7"])

    def test_another_form_of_citation_is_found(self):
        for text in ("// MATH: section 4a", "// see math 4.2", "# docs/mathematics.md 4.2"):
            self.assertNotEqual(wrong_citations(text, self.KNOWN), [], text)

    def test_a_constant_of_another_value_is_found(self):
        source = "inline constexpr double kA = 0.25,  // why\n    kB = 1.0 / 16;\nfloat kC[] = {1.0f,\n 2.0f};"
        for name, value in (("kA", "0.25"), ("kB", "1.0 / 16"), ("kC", "{1.0f, 2.0f}")):
            self.assertTrue(defines(source, name, value), name)
        for name, value in (("kA", "0.2"), ("kB", "1.0 / 1"), ("kC", "{1.0f}"), ("kD", "0.25")):
            self.assertFalse(defines(source, name, value), name)


if __name__ == "__main__":
    unittest.main()
