#!/usr/bin/env python3
"""The machine-readable side of published bundles (scripts/publish.sh), with Python's own library alone.

    published.py stacks INSPECT.json             stacks that can take a bundle, as `export --to` has them
    published.py cautions CARD [--allow KIND]    exit with 2 where the card has another caution
    published.py folder DIR NAME < INSPECT.json  writes DIR/index.json and DIR/SHA256SUMS
    published.py zoo DIR [--check]               writes DIR/index.json over the folders in DIR that have
                                                 one; --check: compares instead, and looks at every hash
INSPECT.json is what `oscar-bundle inspect --json` says of DIR/NAME.h5.
"""
import argparse
import hashlib
import json
import pathlib
import re
import sys

FOLDER, ZOO = "oscar-published-1", "oscar-zoo-1"
INDEX, SUMS = "index.json", "SHA256SUMS"
# Rows of `oscar-bundle stacks` by the formats of `oscar-bundle export --to`. Not sglang-0c88a: what a published
# bundle has for it is what sglang-v2 serves.
EXPORTS = {"sglang-v1": "sglang-v1", "sglang-v2": "sglang-v2", "vllm-pr46774": "vllm-pr46774",
           "mlx": "mlx", "gguf-rot": "llama.cpp"}


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def write_json(path, value):
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def able(inspection):
    verdicts = {stack["name"]: stack["verdict"] for stack in inspection["stacks"]}
    return [name for name, row in EXPORTS.items() if verdicts[row] != "cannot"]


def refused_cautions(card, allowed):
    """(kind, sentence) of what the card cautions of; card.cpp writes these lines."""
    found = re.findall(r"^> \*\*Caution\*\* \(`([a-z-]+)`\): (.*)$", card.read_text(), re.MULTILINE)
    return [(kind, sentence) for kind, sentence in found if kind not in allowed]


def figures_of(report, name):
    """The measured figures of one report, without series and cells."""
    methods = {}
    for method, found in report["methods"].items():
        if "@" in method:
            continue
        kept = {key: found[key] for key in ("bpe", "ppl") if key in found}
        kept |= {key: {part: found[key][part] for part in ("mean", "se")}
                 for key in ("kl", "top1") if key in found}
        if "niah" in found:
            kept["niah"] = {part: found["niah"][part]
                            for part in ("passed", "prompts", "rate", "low", "high")}
        methods[method] = kept
    how = {key: report[key] for key in ("device", "mode", "engine", "tokens", "first_position",
                                        "longest_sequence", "command", "tool", "corpus") if key in report}
    return {"file": name, **how, "methods": methods}


def licence_of(card):
    """license of the card's front matter."""
    front = card.read_text().split("---\n")[1]
    found = re.search(r"^license: (\S+)$", front, re.MULTILINE)
    return found[1] if found else None


def index_of(folder, name, inspection, base_model):
    model = inspection["model"]
    keys = ("name", "verdict", "variant", "clip", "relative_error", "kl_factor", "do_not_serve", "line")
    stacks = [{key: stack[key] for key in keys if key in stack} for stack in inspection["stacks"]]
    for stack in stacks:
        exports = [f"exports/{export}" for export, row in EXPORTS.items()
                   if row == stack["name"] and (folder / "exports" / export).is_dir()]
        stack["folder"] = exports[0] if exports else None
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in (SUMS,)
                   and path != folder / INDEX)
    return {"schema": FOLDER, "name": name,
            "model": {"name": model["name"], "architecture": model["architecture"],
                      "base_model": base_model, "licence": licence_of(folder / "README.md"),
                      "weights_fingerprint": model["weights_fingerprint"]},
            "bundle": {"file": f"{name}.h5", "serving_file": f"{name}.serving.h5",
                       **{key: inspection[key] for key in
                          ("content_sha256", "serving_sha256", "preset", "method", "granularity",
                           "tool_version", "tool_commit", "bits_per_element")},
                       "calibration_tokens": inspection["corpus"]["tokens"],
                       "quantizer": inspection["quantizer"]},
            "figures": [figures_of(json.loads(path.read_text()), path.name)
                        for path in sorted(folder.glob("evaluation*.json"))],
            "stacks": stacks,
            "files": [{"path": str(path.relative_to(folder)), "bytes": path.stat().st_size,
                       "sha256": sha256(path)} for path in files]}


def write_folder(folder, name, inspection, base_model):
    write_json(folder / INDEX, index_of(folder, name, inspection, base_model))
    paths = sorted(str(path.relative_to(folder)) for path in folder.rglob("*")
                   if path.is_file() and path != folder / SUMS)
    (folder / SUMS).write_text("".join(f"{sha256(folder / path)}  {path}\n" for path in paths))


def zoo_of(zoo):
    entries = []
    for path in sorted(zoo.glob(f"*/{INDEX}")):
        index = json.loads(path.read_text())
        if index.get("schema") != FOLDER:
            raise SystemExit(f"published: {path}: no index that publish.sh wrote")
        entries.append({"folder": path.parent.name, "index_sha256": sha256(path),
                        **{key: index[key] for key in ("name", "model", "bundle", "figures")}})
    return {"schema": ZOO, "entries": entries}


def faults_of(folder):
    """What is wrong with the files of a published folder; study/ and the like may lie beside them."""
    index = json.loads((folder / INDEX).read_text())
    named = {file["path"] for file in index["files"]}
    for file in index["files"]:
        path = folder / file["path"]
        if not path.is_file():
            yield f"{path} is missing"
        elif (path.stat().st_size, sha256(path)) != (file["bytes"], file["sha256"]):
            yield f"{path} is not the file of {INDEX}"
    sums = dict(line.split("  ", 1)[::-1] for line in (folder / SUMS).read_text().splitlines())
    if set(sums) != named | {INDEX}:
        yield f"{folder / SUMS} names other files than {INDEX}"
    yield from (f"{folder / name} is not the file of {SUMS}" for name, digest in sums.items()
                if (folder / name).is_file() and sha256(folder / name) != digest)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    parts.add_parser("stacks").add_argument("inspection", type=pathlib.Path)
    cautions = parts.add_parser("cautions")
    cautions.add_argument("card", type=pathlib.Path)
    cautions.add_argument("--allow", action="append", default=[])
    folder = parts.add_parser("folder")
    folder.add_argument("folder", type=pathlib.Path)
    folder.add_argument("name")
    folder.add_argument("--base-model", help="on Hugging Face")
    zoo = parts.add_parser("zoo")
    zoo.add_argument("folder", type=pathlib.Path)
    zoo.add_argument("--check", action="store_true", help="write nothing; exit with 1 and say what differs")
    arguments = parser.parse_args()
    if arguments.part == "stacks":
        print("\n".join(able(json.loads(arguments.inspection.read_text()))))
    elif arguments.part == "cautions":
        refused = refused_cautions(arguments.card, arguments.allow)
        for kind, sentence in refused:
            print(f"publish: {sentence}\n  hint: --allow {kind} publishes it with this caution on the card",
                  file=sys.stderr)
        sys.exit(2 if refused else 0)
    elif arguments.part == "folder":
        write_folder(arguments.folder, arguments.name, json.load(sys.stdin), arguments.base_model)
    elif arguments.check:
        faults = [fault for path in sorted(arguments.folder.glob(f"*/{INDEX}"))
                  for fault in faults_of(path.parent)]
        stored = arguments.folder / INDEX
        if not stored.is_file() or json.loads(stored.read_text()) != zoo_of(arguments.folder):
            faults.append(f"{stored} is not of the folders beside it; run scripts/published.py zoo {arguments.folder}")
        print("\n".join(faults) or "published: all files are as indexed")
        sys.exit(bool(faults))
    else:
        write_json(arguments.folder / INDEX, zoo_of(arguments.folder))


if __name__ == "__main__":
    main()
