"""Files of tasks.py: compressed lines of JSON, written whole or not at all."""
import gzip
import hashlib
import json
import os
import pathlib


def write_lines(path: pathlib.Path, items) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    # Neither name nor time inside: the same lines are the same bytes.
    with open(temporary, "wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as file:
        for item in items:
            file.write((json.dumps(item, ensure_ascii=False, separators=(",", ":")) + "\n").encode())
    os.replace(temporary, path)


def read_lines(path: pathlib.Path) -> list:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def sha256_of_lines(path: pathlib.Path) -> str:
    """Of what is in it, so that another zlib makes no difference."""
    digest = hashlib.sha256()
    with gzip.open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
