"""Our tokenizer gives the ids and the text of the `tokenizers` library, on 100,000 strings."""
import os
import pathlib
import struct
import subprocess
import sys
import tempfile

from parity import tokenizer_text

PROGRAM = str(pathlib.Path(os.environ["OSCAR_BIN"]) / "oscar-test-tokenize")
STRINGS = {"qwen": 34000, "llama3": 33000, "glm4": 33000}
LONG_LINES = ["a" * 1_000_000, "ab\u00e9" * 250_000, " " * 1_000_000 + "x", "\n" * 500_000,
              "a\u0301\u0323" * 150_000, "1" * 1_000_000, "!?" * 500_000]


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
        print(f"{name} {what}: {texts[i][:200]!r}\n  ours   {ours[i][:60]}\n"
              f"  theirs {theirs[i][:60]}")
    assert not wrong, f"{name} {what}: {len(wrong)} of {len(texts)} strings differ"


def check_kind(name, folder):
    tokenizer, added = tokenizer_text.train(name)
    path = pathlib.Path(folder) / f"{name}.json"
    tokenizer.save(str(path))
    texts = tokenizer_text.generate(f"{name} strings", STRINGS[name], added)
    if name == "llama3":
        texts += LONG_LINES[:1] + LONG_LINES[2:]
    else:
        texts += LONG_LINES[1:2] + tokenizer_text.unicode_sweep()
    encodings = tokenizer.encode_batch_fast(texts)
    theirs = [e.ids for e in encodings]
    ours = [list(struct.unpack(f"<{len(b) // 4}i", b))
            for b in blocks_of(run("ids", path, texts), 4)]
    check_equal(name, "ids", texts, ours, theirs)
    decoded = [b.decode() for b in blocks_of(run("decode", path, texts), 1)]
    check_equal(name, "decoded", texts, decoded,
                [tokenizer.decode(ids, skip_special_tokens=True) for ids in theirs])
    prose = tokenizer_text.generate("bench", 60000, ["x"])
    print(f"{name}: {len(texts)} strings equal; generated text:",
          run("bench", path, prose).decode().strip())


def ordinary_text():
    """Source and documentation of Python's own library: what corpora look like."""
    files = sorted(pathlib.Path(os.__file__).parent.glob("*.py"))[:120]
    return [f.read_text(encoding="utf-8", errors="replace") for f in files]


def main():
    with tempfile.TemporaryDirectory() as folder:
        for name in STRINGS:
            check_kind(name, folder)
        path = pathlib.Path(folder) / "qwen.json"
        print("qwen, ordinary text:", run("bench", path, ordinary_text()).decode().strip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
