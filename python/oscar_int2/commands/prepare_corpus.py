"""Tokenizes a corpus with transformers, chat template included, and writes token ids.

For tokenizers that the programs do not implement. Files and rows are what the programs read; conversations
go through the checkpoint's own chat template. Documents that do not end with EOS get one. The result is one
stream of ids (1-D), or with --rows one sequence of that many tokens a row (2-D; the rest of the stream,
shorter than a row, is dropped and counted).

In a checkout it runs under any Python 3: where transformers is missing it goes on under the Python of
$OSCAR_PYTHON or .setup.env, or installs what it needs into .venv-corpus, once.
"""
import argparse
import importlib.util
import os
import pathlib
import subprocess
import sys

from ..chat_template import ChatTemplate
from ..documents import PACKED, SUFFIXES, BadFile, BadRow, document_of, rows
from ..errors import OscarError
from .checkout import CHECKOUT, python_of_setup

NEEDED = ("numpy", "transformers", "jinja2", "h5py")
GOING_ON = "OSCAR_PREPARE_CORPUS"  # set in the environment of the Python that was chosen
SHOWN = 3  # rows without a document


def has_packages(python):
    """Whether a Python that may not exist has all packages."""
    find = "import importlib.util, sys; sys.exit(not all(map(importlib.util.find_spec, sys.argv[1:])))"
    try:
        return subprocess.run([python, "-c", find, *NEEDED], check=False).returncode == 0
    except OSError:
        return False


def install_packages(environment):
    """Makes .venv-corpus with the versions that the tests run with."""
    print(f"prepare-corpus: installing {', '.join(NEEDED)} into {environment}", file=sys.stderr)
    try:
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        subprocess.run([CHECKOUT / "scripts" / "install.sh", environment / "bin" / "python", "tests"], check=True,
                       stdout=sys.stderr)
    except subprocess.CalledProcessError:
        sys.exit("error: that failed; a Python with these packages can be named by OSCAR_PYTHON")


def go_on_with_packages(words):
    """Returns when this Python has the packages; else the command starts again under one that has."""
    lacking = [name for name in NEEDED if not importlib.util.find_spec(name)]
    if not lacking:
        return
    if CHECKOUT is None or GOING_ON in os.environ:
        sys.exit(f"error: {sys.executable} lacks {', '.join(lacking)}\n  hint: install them with its pip")
    own = CHECKOUT / ".venv-corpus"
    own_python = str(own / "bin" / "python")
    python = next((p for p in (python_of_setup(), own_python) if p and has_packages(p)), None)
    if python is None:
        install_packages(own)
        python = own_python
    paths = [str(CHECKOUT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ |= {GOING_ON: "1", "PYTHONPATH": os.pathsep.join(paths)}
    os.execv(python, [python, "-m", "oscar_int2", "prepare-corpus", *words])


def files_of(path):
    """The file itself, or those of a folder in order. In a folder .json files are what describes it."""
    if not path.is_dir():
        return [path]
    names = [suffix + packed for suffix in SUFFIXES if suffix != ".json" for packed in ("", *PACKED)]
    return [file for file in sorted(path.iterdir()) if file.name.lower().endswith(tuple(names))]


def encode(tokenizer, text, is_chat):
    """Ids of one document."""
    ids = list(tokenizer(text, add_special_tokens=not is_chat)["input_ids"])
    # A template may write a line break behind the token that ends the last turn.
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ids[-(2 if is_chat else 1):]:
        ids.append(tokenizer.eos_token_id)
    return ids


def template_of(tokenizer):
    texts = tokenizer.chat_template or {}
    return ChatTemplate(texts if isinstance(texts, dict) else {"default": texts}, tokenizer.special_tokens_map)


def documents_of(file, template):
    """Yields (text, whether it is a chat) or a BadRow, which names the file, of each row. Raises BadFile, which names it too."""
    try:
        for place, row in rows(file.read_bytes(), str(file)):
            try:
                if isinstance(row, BadRow):
                    raise row
                text, is_chat = document_of(row, template)
                if not text.strip():
                    raise BadRow("its text is empty")
                yield text, is_chat
            except BadRow as error:
                yield BadRow(f"{file}, {place}: {error}")
    except (OscarError, UnicodeDecodeError) as error:
        raise BadFile(f"{file}: {error}") from error


def read(tokenizer, path, strict):
    """(ids of all documents, how many there were). Says which rows, and which files of a folder, are left out; with `strict`
    the first ends it."""
    template, ids, count, bad_rows, empty = template_of(tokenizer), [], 0, [], []
    for file in files_of(path):
        before = count
        for found in documents_of(file, template):
            if isinstance(found, BadRow):
                bad_rows.append(str(found))
            else:
                ids += encode(tokenizer, *found)
                count += 1
        if count == before and path.is_dir():
            empty.append(f"{file}: no document")
        if strict and bad_rows + empty:
            sys.exit(f"error: {(bad_rows + empty)[0]}")
    for what, places in (("rows", bad_rows), ("files", empty)):
        if places:
            print("\n  ".join([f"left out {what} without a document: {len(places)}", *places[:SHOWN]]), file=sys.stderr)
    return ids, count


def write(path, ids):
    """Writes int32 ids as .npy, or as dataset `tokens` of an .h5 file."""
    if path.suffix == ".npy":
        import numpy
        numpy.save(path, ids)
    else:
        import h5py
        with h5py.File(path, "w") as file:
            file.create_dataset("tokens", data=ids)


def main(words):
    parser = argparse.ArgumentParser(prog="python -m oscar_int2 prepare-corpus",
                                     description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("model", help="checkpoint folder with its tokenizer")
    parser.add_argument("corpus", type=pathlib.Path, help="a file of text as the programs read it, or a folder of these")
    parser.add_argument("out", type=pathlib.Path, help=".npy or .h5 to write")
    parser.add_argument("--rows", type=int, default=0, metavar="N",
                        help="write rows of N tokens instead of one stream")
    parser.add_argument("--strict", action="store_true",
                        help="rows, and files of a folder, without a document end the run (default: they are left out and "
                        "counted)")
    arguments = parser.parse_args(words)
    if arguments.out.suffix not in (".npy", ".h5"):
        parser.error("OUT must end in .npy or .h5")
    if arguments.rows < 0:
        parser.error("--rows must be positive")
    go_on_with_packages(words)
    import numpy
    from transformers import AutoTokenizer
    try:
        ids, count = read(AutoTokenizer.from_pretrained(arguments.model), arguments.corpus, arguments.strict)
    except (OscarError, OSError, UnicodeDecodeError) as error:
        sys.exit(f"error: {error}" if isinstance(error, BadFile) else f"error: {arguments.corpus}: {error}")
    dropped = 0
    if arguments.rows:
        dropped = len(ids) % arguments.rows
        ids = ids[:len(ids) - dropped]
    if not ids:
        sys.exit(f"error: {arguments.corpus}: no tokens")
    shape = (-1, arguments.rows) if arguments.rows else (-1,)
    array = numpy.array(ids, dtype=numpy.int32).reshape(shape)
    write(arguments.out, array)
    print(f"{arguments.out}: {count} documents, ids of shape {list(array.shape)}, "
          f"{dropped} tokens dropped at the end")
    return 0
