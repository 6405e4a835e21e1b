#!/usr/bin/env python3
"""How README and docs read: words and commas of a sentence. With --table: of every page."""
import os
import pathlib
import re
import sys
import unittest

SOURCE = pathlib.Path(os.environ.get("OSCAR_SOURCE", pathlib.Path(__file__).parents[2]))
# docs/mathematics.md is a derivation: its sentences carry formulas.
PAGES = sorted({SOURCE / "README.md", *(SOURCE / "docs").glob("*.md")} - {SOURCE / "docs" / "mathematics.md"})
README_LINES = 80
MOST_WORDS, MOST_WITH_COMMAS = 18, 0.15  # words a sentence; share of sentences with three commas or more


def sentences(text):
    """Of a page, without code, tables, headings and what links lead to."""
    text = re.sub(r"^(```|~~~).*?^\1", "\n", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->|<[^>\n]+>", " ", text, flags=re.DOTALL)
    text = re.sub(r"^\s*(\||#|!\[|\[!\[).*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "code", text)
    blocks = re.split(r"\n\s*\n|\n\s*(?:[-*+]|\d+\.)\s+", "\n" + text)
    found = []
    for block in blocks:
        block = " ".join(block.replace("**", "").split())
        found += re.split(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[]?[A-Z0-9a-z])", block)
    return [sentence for sentence in found if len(sentence.split()) > 1]


def measured(pages):
    """(sentences, words a sentence, share with three commas or more)"""
    found = [sentence for page in pages for sentence in sentences(page.read_text())]
    commas = [len(re.findall(r",(?!\d)", sentence)) for sentence in found]
    return (len(found), sum(len(s.split()) for s in found) / len(found),
            sum(n >= 3 for n in commas) / len(found))


class Prose(unittest.TestCase):
    def test_sentences_are_short(self):
        _, words, with_commas = measured(PAGES)
        self.assertLess(words, MOST_WORDS)
        self.assertLessEqual(with_commas, MOST_WITH_COMMAS)

    def test_the_readme_is_one_screen(self):
        self.assertLessEqual(len((SOURCE / "README.md").read_text().splitlines()), README_LINES)


if __name__ == "__main__":
    if sys.argv[1:] == ["--table"]:
        for page in PAGES:
            print("{:>5} sentences {:5.1f} words {:4.0%}  ".format(*[*measured([page])[:2], measured([page])[2]]) +
                  str(page.relative_to(SOURCE)))
        print("{:>5} sentences {:5.1f} words {:4.0%}  all".format(*measured(PAGES)))
    else:
        unittest.main(verbosity=2)
