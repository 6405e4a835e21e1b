"""Our tokenizer gives the ids of the `tokenizers` library, on 100,000 strings for each family.

Where the decoder is byte-level also the text of the ids. Then every component with every setting,
on fewer strings.
"""
import array
import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile

from tokenizers import Tokenizer

from parity import tokenizer_kinds, tokenizer_text

PROGRAM = str(pathlib.Path(os.environ["OSCAR_BIN"]) / "oscar-test-tokenize")
STRINGS, COMPONENT_STRINGS = 100_000, 1_500
DECODED = ("qwen", "llama3", "glm4")
LONG_LINES = ["a" * 100_000, "ab\u00e9" * 30_000, " " * 100_000 + "x", "\n" * 60_000,
              "a\u0301\u0323" * 20_000, "1" * 100_000, "!?" * 50_000, "the \u4e16\u754c, " * 10_000]
# Searching a long run of white space for one that ends a line takes its length squared.
QUADRATIC = {"deepseek": (2,)}


def run(mode, path, texts):
    blocks = b"".join(struct.pack("<I", len(t)) + t for t in (s.encode() for s in texts))
    return subprocess.run([PROGRAM, str(path), mode], input=blocks, check=True,
                          stdout=subprocess.PIPE).stdout


def blocks_of(data, item):
    blocks, at = [], 0
    while at < len(data):
        (count,) = struct.unpack_from("<I", data, at)
        blocks.append(data[at + 4:at + 4 + count * item])
        at += 4 + count * item
    return blocks


def check_equal(name, what, texts, ours, theirs):
    assert len(ours) == len(theirs) == len(texts), (name, what, len(ours), len(theirs))
    wrong = [i for i in range(len(texts)) if ours[i] != theirs[i]]
    for i in wrong[:5]:
        shown = [list(array.array("i", x)) if what == "ids" else x for x in (ours[i], theirs[i])]
        print(f"{name} {what}: {texts[i][:200]!r}\n  ours   {shown[0][:60]}\n"
              f"  theirs {shown[1][:60]}")
    assert not wrong, f"{name} {what}: {len(wrong)} of {len(texts)} strings differ"


def check_ids(name, path, tokenizer, texts):
    """Compares the ids; returns those of the library."""
    theirs = [e.ids for e in tokenizer.encode_batch_fast(texts)]
    check_equal(name, "ids", texts, blocks_of(run("ids", path, texts), 4),
                [array.array("i", ids).tobytes() for ids in theirs])
    return theirs


def check_kind(name, path, texts, prose):
    tokenizer = tokenizer_kinds.make(name)
    tokenizer.save(str(path))
    skipped = QUADRATIC.get(name, ())
    lines = [line for i, line in enumerate(LONG_LINES) if i not in skipped]
    theirs = check_ids(name, path, tokenizer, texts + lines)
    if name in DECODED:
        decoded = [b.decode() for b in blocks_of(run("decode", path, texts), 1)]
        check_equal(name, "decoded", texts, decoded,
                    [tokenizer.decode(ids, skip_special_tokens=True) for ids in theirs[:len(texts)]])
    speed = run("bench", path, prose).decode().strip()
    print(f"{name}: {len(texts) + len(lines)} strings equal; ordinary text: {speed}", flush=True)


def ordinary_text():
    """Source and documentation of Python's own library: what corpora look like."""
    files = sorted(pathlib.Path(os.__file__).parent.glob("*.py"))[:60]
    return [f.read_text(encoding="utf-8", errors="replace") for f in files]


def main():
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "tokenizer.json"
        texts = tokenizer_text.generate("strings", STRINGS, tokenizer_kinds.ADDED, fragments=4)
        prose = ordinary_text()
        for name in tokenizer_kinds.KINDS:
            check_kind(name, path, texts, prose)
        components = texts[:COMPONENT_STRINGS]
        sweep = tokenizer_text.unicode_sweep()
        for name, document in tokenizer_kinds.component_documents():
            path.write_text(json.dumps(document), encoding="utf-8")
            tokenizer = Tokenizer.from_file(str(path))
            of_characters = name in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Whitespace") or \
                name.startswith(("punctuation", "digits"))
            check_ids(name, path, tokenizer, components + (sweep if of_characters else []))
            print(f"{name}: equal", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
