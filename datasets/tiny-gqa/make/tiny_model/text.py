"""Training text: permissively licensed source and documentation of the installed Python packages and the standard library."""

import hashlib
import importlib.metadata as metadata
import multiprocessing
import random
import re
import sysconfig
from pathlib import Path

SUFFIXES = (".py", ".pyi", ".pyx", ".md", ".rst", ".txt", ".h", ".hpp", ".cuh")
PERMISSIVE_IDS = {
    "MIT", "MIT-0", "MIT-CMU", "BSD", "BSD-1-CLAUSE", "BSD-2-CLAUSE", "BSD-3-CLAUSE", "0BSD", "APACHE-2.0", "ISC",
    "PSF-2.0", "PYTHON-2.0", "PYTHON-2.0.1", "CNRI-PYTHON", "ZLIB", "CC0-1.0", "UNLICENSE", "BSL-1.0", "HPND", "NCSA",
    "LLVM-EXCEPTION",
}
PERMISSIVE_CLASSIFIER = re.compile(r"MIT|BSD|Apache|Python Software Foundation|ISC|zlib|Public Domain|HPND|Unlicense", re.I)
PERMISSIVE_NAME = re.compile(
    r"(the )?(mit|isc|psf|psf-2\.0|python-2\.0|unlicense|(new |modified |simplified )?bsd[ -]?[23]?([ -]clause)?( or mit)?"
    r"|[23]-clause bsd|apache([ -]?(software )?(license|2))?[ ,]*(version )?v?(2(\.0)?)?)( license)?( license version 2\.0)?", re.I)
REFUSED = re.compile(r"\b[AL]?GPL|General Public Licen|Mozilla Public|MPL-?[12]|EUPL|proprietary|Creative Commons|CC[- ]BY", re.I)
REFUSED_IN_FILE = re.compile(
    r"\b[AL]?GPL(v|\b)|General Public Licen|Mozilla Public|proprietary|Creative Commons|CC[- ]BY|NVIDIA CORPORATION", re.I)
SKIPPED_FOLDERS = re.compile(r"(^|/)(_?vendor(ed)?|third[_-]?party|externals?|extern|site-packages|[^/]*\.dist-info)(/|$)")
SKIPPED_NAMES = re.compile(r"licen[cs]e|copying|notice|authors|copyright|requirements|sources\.txt", re.I)
LICENCE_WORDS = re.compile(r"copyright|licen[cs]e|SPDX|all rights reserved", re.I)
LEADING_BLOCK = re.compile(r"\A(?:\s*(?:#[^\n]*\n)+|\s*/\*.*?\*/[^\n]*\n|(?:\s*//[^\n]*\n)+|\s*\.\. [^\n]*\n(?:[ \t]+[^\n]*\n|\n)*)", re.S)
LICENCE_LINE = re.compile(r"^[^\n]*(copyright (\(c\)|©|[12]\d{3})|SPDX-License-Identifier|all rights reserved)[^\n]*\n", re.I | re.M)


def permissive_licence(distribution) -> str | None:
    """The licence a package's own metadata states, if all of it is permissive; None refuses the package."""
    meta = distribution.metadata
    expression = meta.get("License-Expression")
    if expression:
        ids = [i for i in re.split(r"\s+|[()]", expression) if i and i.upper() not in ("AND", "OR", "WITH")]
        return expression if all(i.upper() in PERMISSIVE_IDS for i in ids) else None
    stated = meta.get("License") or ""
    classifiers = [c.split("::")[-1].strip() for c in meta.get_all("Classifier") or [] if c.startswith("License ::")]
    classifiers = [c for c in classifiers if c != "OSI Approved"]
    if REFUSED.search(stated[:2000]) or any(REFUSED.search(c) for c in classifiers):
        return None
    if classifiers:
        return " / ".join(classifiers) if all(PERMISSIVE_CLASSIFIER.search(c) for c in classifiers) else None
    first_line = stated.strip().split("\n")[0].strip().rstrip(".")
    return first_line if PERMISSIVE_NAME.fullmatch(first_line) else None


def wanted(path: str, size: int) -> bool:
    """Text of a useful size and kind, outside vendored folders (their licence is not the package's)."""
    name = path.rsplit("/", 1)[-1]
    return (path.endswith(SUFFIXES) and 512 < size < 400_000 and not SKIPPED_FOLDERS.search(path)
            and not SKIPPED_NAMES.search(name))


def list_sources():
    """[(package, version, licence, [files])] of everything allowed, and the names of what was refused."""
    sources, refused = [], []
    for distribution in sorted(metadata.distributions(), key=lambda d: (d.metadata["Name"] or "").lower()):
        licence = permissive_licence(distribution)
        if licence is None:
            refused.append(distribution.metadata["Name"] or "?")
            continue
        files = []
        for entry in distribution.files or []:
            path = Path(distribution.locate_file(entry))
            if entry.suffix in SUFFIXES and path.is_file() and wanted(str(entry), path.stat().st_size):
                files.append(str(path))
        if files:
            sources.append((distribution.metadata["Name"], distribution.version, licence, sorted(set(files))))
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(str(p) for p in root.rglob("*")
                   if p.is_file() and wanted(str(p.relative_to(root)), p.stat().st_size))
    sources.append(("Python standard library", sysconfig.get_python_version(), "PSF-2.0", files))
    return sources, refused


def clean(path: str) -> str | None:
    """The file's text without its licence header; None when it is unreadable, another licence's or mostly numbers."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    if REFUSED_IN_FILE.search(text[:6000]) or "\0" in text:
        return None
    while (block := LEADING_BLOCK.match(text)) and LICENCE_WORDS.search(block.group()):
        text = text[block.end():]
    text = LICENCE_LINE.sub("", text).strip() + "\n"
    digits = sum(c.isdigit() for c in text[:20_000])
    return text if len(text) > 400 and digits < 0.2 * min(len(text), 20_000) else None


def deduplicate(texts):
    """Indices of texts that are new: not seen whole, and less than 60% of their long lines seen in earlier ones."""
    whole, lines, kept = set(), set(), []
    for index, text in enumerate(texts):
        if text is None:
            continue
        digest = hashlib.md5(" ".join(text.split()).encode()).digest()
        own = {hash(line.strip()) for line in text.split("\n") if len(line) > 30}
        if digest in whole or (own and len(own & lines) > 0.6 * len(own)):
            continue
        whole.add(digest)
        lines |= own
        kept.append(index)
    return kept


def gather(max_bytes: int, processes: int, seed: int):
    """(texts in shuffled order, table of what was used [(package, version, licence, files, bytes)], refused names)."""
    sources, refused = list_sources()
    owner = [(path, i) for i, source in enumerate(sources) for path in source[3]]
    random.Random(seed).shuffle(owner)
    # read a little more than the cap, because cleaning and deduplication take some away
    total, count = 0, 0
    while count < len(owner) and total < 2 * max_bytes:
        total += Path(owner[count][0]).stat().st_size
        count += 1
    owner = owner[:count]
    with multiprocessing.Pool(processes) as pool:
        texts = pool.map(clean, [path for path, _ in owner], chunksize=64)
    used, kept, size = {}, [], 0
    for index in deduplicate(texts):
        length = len(texts[index].encode())
        if size + length > max_bytes:
            break
        size += length
        files, byte_count = used.get(owner[index][1], (0, 0))
        used[owner[index][1]] = (files + 1, byte_count + length)
        kept.append(texts[index])
    table = [(*sources[i][:3], *used[i]) for i in sorted(used)]
    return kept, table, refused
