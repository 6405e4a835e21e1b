"""Tokenizes a corpus with transformers, chat template included, and writes token ids.

For checkpoints whose tokenizer or chat template the programs do not build in. Conversations
(`messages`) go through the checkpoint's own apply_chat_template; `prompt` with `completion` and
`text` go through its tokenizer, and documents that do not end with EOS get one. The result is one
stream of ids (1-D), or with --rows one sequence of that many tokens a row (2-D; the rest of the
stream, shorter than a row, is dropped and counted).

In a checkout it runs under any Python 3: where transformers is missing it goes on under the Python of
$OSCAR_PYTHON or .setup.env, or installs what it needs into .venv-corpus, once.
"""
import argparse
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

from .checkout import CHECKOUT, python_of_setup

NEEDED = ("numpy", "transformers", "jinja2", "h5py")
GOING_ON = "OSCAR_PREPARE_CORPUS"  # set in the environment of the Python that was chosen


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


def documents(path):
    """Yields (text or messages, place) for each document of a file or a folder of files."""
    if path.is_dir():
        for file in sorted(path.iterdir()):
            if file.suffix in (".txt", ".jsonl"):
                yield from documents(file)
    elif path.suffix == ".txt":
        yield path.read_text(encoding="utf-8"), str(path)
    elif path.suffix == ".jsonl":
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                place = f"{path}, line {number}"
                try:
                    item = json.loads(line)
                    if "messages" in item:
                        yield item, place
                    elif "prompt" in item:
                        yield item["prompt"] + item["completion"], place
                    else:
                        yield item["text"], place
                except (ValueError, KeyError, TypeError) as error:
                    sys.exit(f"error: {place}: {error!r}")
    else:
        sys.exit(f"error: {path}: expected .txt, .jsonl, or a folder of these")


def encode(tokenizer, document):
    """Ids of one document."""
    if isinstance(document, str):
        ids, tail = list(tokenizer(document)["input_ids"]), 1
    else:
        text = tokenizer.apply_chat_template(document["messages"], tools=document.get("tools"),
                                             tokenize=False)
        ids, tail = list(tokenizer(text, add_special_tokens=False)["input_ids"]), 2
    # A template may write a line break behind the token that ends the last turn.
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ids[-tail:]:
        ids.append(tokenizer.eos_token_id)
    return ids


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
    parser.add_argument("corpus", type=pathlib.Path, help=".txt, .jsonl, or a folder of these")
    parser.add_argument("out", type=pathlib.Path, help=".npy or .h5 to write")
    parser.add_argument("--rows", type=int, default=0, metavar="N",
                        help="write rows of N tokens instead of one stream")
    arguments = parser.parse_args(words)
    if arguments.out.suffix not in (".npy", ".h5"):
        parser.error("OUT must end in .npy or .h5")
    if arguments.rows < 0:
        parser.error("--rows must be positive")
    go_on_with_packages(words)
    import numpy
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)

    ids, count = [], 0
    for document, place in documents(arguments.corpus):
        try:
            ids += encode(tokenizer, document)
        except Exception as error:  # whatever a template raises; the place is what helps
            sys.exit(f"error: {place}: {error}")
        count += 1
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
