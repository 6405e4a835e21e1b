#!/usr/bin/env python3
"""Public names use the words of docs/glossary.md, and the glossary's words are in use."""
import ast
import pathlib
import re
import subprocess
import unittest

from support.programs import BIN, SOURCE, run

PAGE = SOURCE / "docs" / "glossary.md"
PROGRAMS = ("oscar-calibrate", "oscar-eval", "oscar-bundle", "oscar-bench")
# Part of a name -> the word in its place.
OLD = {"centre": "center", "centring": "centering", "twin": "reference", "chunk": "sequence, or page",
       "slot": "spec, stage or index", "stack": "backend", "seat": "max_num_seqs", "rows_indptr": "query_start_loc"}
# What these words mean where they stay.
STAYS = {
    "chunk": r"prefill_chunk|[Cc]hunked|chunked_prefill",  # of a prompt
    "slot": r"window_slot|WindowSlot|slot_of|of_slot|^slots?_?$|_slots$|slot_mapping",  # of a request; vLLM's
    "stack": r"MatrixStack|VectorStack|^stack$|^haystack$|Stacked|stacked",  # of matrices
    "twin": r"[a-z]tWin|sWin",  # ExactWindows
}
PLACES = {
    "chunk": ("lib/oscar/io/hdf5.h", "python/oscar_int2/vllm/", "python/oscar_int2/bundle.py"),  # HDF5's, vLLM's
}
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


def old_words(name, place):
    """The words of OLD in a name that do not mean there what they may."""
    return [word for word in OLD
            if re.search(word, re.sub(STAYS.get(word, r"(?!)"), "", name), re.IGNORECASE)
            and not place.startswith(PLACES.get(word, ()) or ("\0",))]


def header_names():
    """(name, place) of every identifier in public headers, without comments and strings."""
    for folder in ("lib/oscar", "kernels/include"):
        for path in sorted((SOURCE / folder).rglob("*.h")):
            code = re.sub(r"//[^\n]*|R?\"(?:\\.|[^\"\\\n])*\"", " ", path.read_text(encoding="utf-8"))
            for name in set(IDENTIFIER.findall(code)):
                yield name, str(path.relative_to(SOURCE))


def python_names():
    """(name, place) of what modules, classes and functions of the package call theirs."""
    for path in sorted((SOURCE / "python").rglob("*.py")):
        place = str(path.relative_to(SOURCE))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                yield node.name, place
            if isinstance(node, ast.arg):
                yield node.arg, place
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield node.attr, place
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                yield node.target.id, place


def operator_names():
    """(name, place) of the torch operators and their arguments."""
    for path in sorted((SOURCE / "kernels" / "torch").glob("*operators.cpp")):
        text = path.read_text(encoding="utf-8")
        for call in re.findall(r"m\.def\(((?:\s*\"[^\"]*\")+)", text):
            for name in IDENTIFIER.findall("".join(re.findall(r"\"([^\"]*)\"", call))):
                yield name, str(path.relative_to(SOURCE))


def options():
    """(option or sub-command, program) of every --help."""
    for program in PROGRAMS:
        if not (BIN / program).exists():
            continue
        text = run(program, "--help").stdout
        subcommands = re.findall(r"^  ([a-z]+) {2,}\S", text.partition("Subcommands:")[2], re.MULTILINE)
        for command in ([program], *([program, name] for name in subcommands)):
            said = run(*command, "--help").stdout
            for name in (*command[1:], *re.findall(r"(?<![\w-])--[a-z][\w-]*", said)):
                yield name, " ".join(command)


def glossary():
    """(word, place) of each row."""
    rows = re.findall(r"^\| ([^|]+?) \| [^|]+ \| `([^`]+)` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [(word.strip(), place) for words, place in rows for word in re.split(r", | and ", words)]


class Glossary(unittest.TestCase):
    def expect_none(self, names, least):
        names = list(names)
        self.assertGreater(len(names), least)  # they are found at all
        found = sorted({f"{place}: {name} says {', '.join(words)}: use {', '.join(OLD[w] for w in words)}"
                        for name, place in names if (words := old_words(name, place))})
        self.assertEqual(found, [])

    def test_old_words_are_found_and_those_with_a_meaning_of_their_own_stay(self):
        for name, words in (("key_centres", ["centre"]), ("TokenChunks", ["chunk"]), ("bf16_twin", ["twin"]),
                            ("find_stack", ["stack"]), ("SideSlots", ["slot"]), ("ExactWindows", []),
                            ("MatrixStack", []), ("window_slot", []), ("prefill_chunk", []), ("page_bytes", [])):
            self.assertEqual(old_words(name, "lib/oscar/x.h"), words, name)

    def test_headers(self):
        self.expect_none(header_names(), 1000)

    def test_the_python_package(self):
        self.expect_none(python_names(), 200)

    def test_operators(self):
        self.expect_none(operator_names(), 50)

    @unittest.skipUnless((BIN / "oscar-bundle").exists(), "the programs are not built")
    def test_options_and_sub_commands(self):
        self.expect_none(options(), 20)

    def test_every_word_is_in_use_where_the_page_says(self):
        words = glossary()
        self.assertGreater(len(words), 25)
        for word, place in words:
            with self.subTest(word):
                text = (SOURCE / place).read_text(encoding="utf-8")
                parts = [part.rstrip("s") for part in re.split(r"[\s_-]+", word)]
                found = re.search(r"[\s\S]{0,3}".join(map(re.escape, parts)), text, re.IGNORECASE)
                self.assertTrue(found, f"{place} does not say {word}")

    def test_pages_link_to_it(self):
        self.assertIn("(glossary.md)", (SOURCE / "docs" / "README.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    unittest.main(verbosity=2)
