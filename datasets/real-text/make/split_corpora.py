#!/usr/bin/env python3
"""Makes the corpora of datasets/real-text from the source archives that `python -m oscar_int2 fetch` fetches.

Each domain becomes three .jsonl files of whole documents, for calibration, for choosing constants
(tune) and for measuring (heldout). Documents go in the order of a hash of their name: one that shares
many runs of words with a document before it is left out, any other joins the part that has least of
its share of characters so far. Equal archives give equal bytes.
  split_corpora.py ARCHIVES OUT
"""
import argparse
import fnmatch
import hashlib
import json
import pathlib
import sys
import tarfile

# Of which members of which archives each domain is made. No package is in two domains.
DOMAINS = {
    "documentation": (("django-5.2.1.tar.gz", "docs/*.txt"), ("sphinx-8.2.3.tar.gz", "doc/*.rst")),
    "code": (("trio-0.30.0.tar.gz", "src/*.py"), ("werkzeug-3.1.3.tar.gz", "*.py"),
             ("flask-3.1.1.tar.gz", "*.py")),
    "prose": tuple(("brotli-1.2.0.tar.gz", f"tests/testdata/{book}.txt")
                   for book in ("alice29", "asyoulik", "lcet10", "plrabn12")),
}
SHARES = {"calibration": 60, "tune": 20, "heldout": 20}
FEWEST_CHARACTERS = 2000  # shorter files are stubs and lists of imports
RUN_WORDS = 13  # words in a run, as many as tokens in those of lib/oscar/text/ngram_fingerprint.h
MOST_SHARED = 0.05  # of the runs of a document that may stand in documents before it


def members(archive, pattern):
    """(name, text) of the files that match `pattern` below the archive's one folder."""
    with tarfile.open(archive) as file:
        for member in file:
            path = member.name.partition("/")[2]
            if member.isfile() and fnmatch.fnmatchcase(path, pattern):
                text = file.extractfile(member).read().decode("utf-8", errors="replace")
                yield member.name, text.replace("\r\n", "\n").replace("\x1a", "")


def documents(archives, domain):
    """(name, text) of a domain, in the order of a hash of the name."""
    found = [document for archive, pattern in DOMAINS[domain]
             for document in members(archives / archive, pattern)]
    return sorted(((name, text) for name, text in found if len(text) >= FEWEST_CHARACTERS),
                  key=lambda document: hashlib.sha256(document[0].encode()).digest())


def runs(text):
    """Hashes of all runs of RUN_WORDS words."""
    words = text.split()
    return {hashlib.blake2b(" ".join(words[i:i + RUN_WORDS]).encode(), digest_size=8).digest()
            for i in range(max(1, len(words) - RUN_WORDS + 1))}


def split(found, seen):
    """Part -> its documents, and how many were left out. `seen`: runs of all documents before."""
    parts, characters, left_out = {part: [] for part in SHARES}, dict.fromkeys(SHARES, 0), 0
    for name, text in found:
        own = runs(text)
        if len(own & seen) > MOST_SHARED * len(own):
            left_out += 1
            continue
        seen |= own
        part = min(SHARES, key=lambda name_of: characters[name_of] / SHARES[name_of])
        parts[part].append((name, text))
        characters[part] += len(text)
    return parts, left_out


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("archives", type=pathlib.Path, help="folder with the source archives")
    parser.add_argument("out", type=pathlib.Path, help="folder to write DOMAIN-PART.jsonl into")
    options = parser.parse_args(arguments)
    seen = set()
    for domain in DOMAINS:
        parts, left_out = split(documents(options.archives, domain), seen)
        print(f"corpora: {domain}: " + ", ".join(f"{len(parts[part])} documents {part}" for part in SHARES)
              + f", {left_out} left out as near-duplicates")
        for part, chosen in parts.items():
            with (options.out / f"{domain}-{part}.jsonl").open("w", encoding="utf-8", newline="\n") as file:
                for name, text in chosen:
                    file.write(json.dumps({"text": text, "source": name}, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
