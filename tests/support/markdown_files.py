"""The project's Markdown files as their readers see them: prose, links, anchors, fenced blocks."""
import dataclasses
import pathlib
import re
import subprocess

from support.programs import SOURCE

FENCE = re.compile(r"^(```+)[ \t]*(\w*)[ \t]*\n(.*?)^\1[ \t]*$\n?", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)


def project_files():
    """Paths of all files of the project, relative to its root."""
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"],
                            cwd=SOURCE, capture_output=True, text=True)
    if listed.returncode == 0:
        names = listed.stdout.splitlines()
    else:  # a copy without history: what is not hidden and not built
        names = [str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*")
                 if path.is_file() and not re.search(r"(^|/)(\.|build|quickstart|corpora/|models/)",
                                                     str(path.relative_to(SOURCE)))]
    return [pathlib.PurePosixPath(name) for name in names if (SOURCE / name).exists()]


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block: the word behind its fence, its text, and the line it begins on."""
    language: str
    text: str
    line: int


class MarkdownFile:
    def __init__(self, name):
        self.name = str(name)
        self.folder = (SOURCE / name).parent
        self.text = (SOURCE / name).read_text(encoding="utf-8")

    def blocks(self):
        return [Block(found[2], found[3], self.text.count("\n", 0, found.start()) + 1)
                for found in FENCE.finditer(self.text)]

    def prose(self):
        """The text without fenced blocks."""
        return FENCE.sub("\n", self.text)

    def code_spans(self):
        return INLINE_CODE.findall(self.prose())

    def links(self):
        return LINK.findall(INLINE_CODE.sub("", self.prose()))

    def anchors(self):
        """Of its headings, as GitHub makes them."""
        seen = {}
        for heading in HEADING.findall(self.prose()):
            words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
            anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
            count = seen.get(anchor, 0)
            seen[anchor] = count + 1
            yield f"{anchor}-{count}" if count else anchor


def markdown_files():
    return [MarkdownFile(name) for name in project_files() if name.suffix == ".md"]


def section(page, heading):
    return MarkdownFile(page).text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def headed_tables(page, heading):
    """(headings, rows) of each table under `heading`, as lists of cells without emphasis and backticks."""
    for table in re.findall(r"(?:^\|.*\n)+", section(page, heading), re.MULTILINE):
        cells = [[cell.strip(" *`") for cell in line.strip("|").split("|")] for line in table.splitlines()]
        yield cells[0], cells[2:]


def tables(page, heading):
    """Rows of each table under `heading`."""
    return [rows for _, rows in headed_tables(page, heading)]


def table_rows(page, heading):
    """Rows of the first table under `heading`."""
    return tables(page, heading)[0]
