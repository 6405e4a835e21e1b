#!/usr/bin/env python3
"""Writes what a build consists of, with versions, as a CycloneDX 1.5 document:

    scripts/make_sbom.py [-o FILE]

Run it with the Python of .setup.env: system libraries are those that scripts/setup.sh asks for, as
installed here, Python packages those of this Python that scripts/locked asks for, with all they need.
"""
import argparse
import importlib.metadata
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
GROUPS = ("build", "cuda", "torch", "tests")  # of scripts/locked/pyproject.toml: what setup.sh installs


def listed(name, setup):
    """Words of a shell array of scripts/setup.sh."""
    body = re.search(rf"^{name}=\(([^)]*)\)", setup, re.MULTILINE)
    return body[1].replace('"', "").split() if body else []


def system_components(packages):
    """Debian packages; none on other systems."""
    try:
        lines = subprocess.run(["dpkg-query", "-W", "-f", "${Package}\t${Version}\n", *packages],
                               capture_output=True, text=True, check=False).stdout.splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        name, version = line.split("\t")
        if version:
            yield {"type": "library", "name": name, "version": version,
                   "purl": f"pkg:deb/debian/{name}@{version}"}


def python_components(names):
    """Installed ones of `names`, and what they need."""
    done, waiting = {}, list(names)
    while waiting:
        name = waiting.pop()
        key = re.sub("[-_.]+", "-", name).lower()
        if key in done:
            continue
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        done[key] = found.version
        waiting += [re.split(r"[\s<>=!~;\[(]", need)[0] for need in found.requires or ()
                    if "extra ==" not in need]
    for name in sorted(done):
        yield {"type": "library", "name": name, "version": done[name],
               "purl": f"pkg:pypi/{name}@{done[name]}"}


def document():
    setup = (ROOT / "scripts" / "setup.sh").read_text()
    version = re.search(r"project\(\w+\s+VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text())
    system = listed("SYSTEM_PACKAGES", setup) + listed("TEST_SYSTEM_PACKAGES", setup)
    locked = (ROOT / "scripts" / "locked" / "pyproject.toml").read_text()
    asked = [name for group in GROUPS
             for name in re.findall(r'"([\w.-]+)', re.search(rf"^{group} = \[(.*?)\]$", locked, re.M | re.S)[1])]
    return {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1,
            "metadata": {"component": {"type": "application", "name": "oscar-toolkit",
                                       "version": version[1] if version else ""}},
            "components": [*system_components(system), *python_components(asked)]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("-o", "--output", default="-", help="file to write; - is stdout")
    arguments = parser.parse_args()
    text = json.dumps(document(), indent=2) + "\n"
    if arguments.output == "-":
        sys.stdout.write(text)
    else:
        pathlib.Path(arguments.output).write_text(text)


if __name__ == "__main__":
    main()
