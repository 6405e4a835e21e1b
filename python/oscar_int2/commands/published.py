"""The machine-readable side of published bundles, and the index over a folder of them.

With Python's own library alone. An inspection is what `oscar-bundle inspect --json -` says of DIR/NAME.h5.
"""
import argparse
import json
import pathlib
import re

from ..weight_files import sha256_of

FOLDER, ZOO = "oscar-published-1", "oscar-zoo-1"
INDEX, SUMS = "index.json", "SHA256SUMS"
# Rows of `oscar-bundle backends` by the formats of `oscar-bundle export --for`. Not sglang-0c88a: what a published
# bundle has for it is what sglang-v2 serves.
EXPORTS = {"sglang-v1": "sglang-v1", "sglang-v2": "sglang-v2", "vllm-pr46774": "vllm-pr46774",
           "mlx": "mlx", "gguf-rot": "llama.cpp"}


def write_json(path, value):
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def able(inspection):
    verdicts = {backend["name"]: backend["verdict"] for backend in inspection["stacks"]}
    return [name for name, row in EXPORTS.items() if verdicts[row] != "cannot"]


def refused_cautions(card, allowed):
    """(kind, sentence) of what the card cautions of; card.cpp writes these lines."""
    found = re.findall(r"^> \*\*Caution\*\* \(`([a-z-]+)`\): (.*)$", card.read_text(), re.MULTILINE)
    return [(kind, sentence) for kind, sentence in found if kind not in allowed]


def warning_of(export):
    """What the README of an export says first, if that is not to serve it; else ""."""
    lines = (line for line in (export / "README.md").read_text(encoding="utf-8").splitlines() if line and not line.startswith("#"))
    first = next(lines, "")
    return first if "DO NOT SERVE" in first else ""


def carry_warnings(folder):
    """Puts the warnings of exports into the card, above its table of them."""
    card = folder / "README.md"
    warned = [f"> **exports/{export.name}**: {warning_of(export)}\n\n" for export in sorted((folder / "exports").glob("*"))
              if warning_of(export)]
    text = card.read_text(encoding="utf-8")
    begin = text.find("Files for other backends")  # card.cpp
    if warned and begin < 0:
        raise SystemExit("publish: the card does not list its exports")
    if warned:
        card.write_text(text[:begin] + "".join(warned) + text[begin:], encoding="utf-8")


def require_whole(report, name):
    """Ends the run where a report is of an evaluation that was stopped. The card refuses it too, by the name of a copy."""
    if "partial" in report:
        raise SystemExit(f"publish: {name} is of an evaluation that was stopped: its figures are of a part of the text\n"
                         "  hint: run oscar-eval again with --resume, which goes on with it")


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
    backends = [{key: backend[key] for key in keys if key in backend} for backend in inspection["stacks"]]
    for backend in backends:
        exports = [f"exports/{export}" for export, row in EXPORTS.items()
                   if row == backend["name"] and (folder / "exports" / export).is_dir()]
        backend["folder"] = exports[0] if exports else None
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
            "stacks": backends,
            "files": [{"path": str(path.relative_to(folder)), "bytes": path.stat().st_size,
                       "sha256": sha256_of(path)} for path in files]}


def write_folder(folder, name, inspection, base_model):
    write_json(folder / INDEX, index_of(folder, name, inspection, base_model))
    paths = sorted(str(path.relative_to(folder)) for path in folder.rglob("*")
                   if path.is_file() and path != folder / SUMS)
    (folder / SUMS).write_text("".join(f"{sha256_of(folder / path)}  {path}\n" for path in paths))


def zoo_of(zoo):
    entries = []
    for path in sorted(zoo.glob(f"*/{INDEX}")):
        index = json.loads(path.read_text())
        if index.get("schema") != FOLDER:
            raise SystemExit(f"published: {path}: no index that python -m oscar_int2 publish wrote")
        entries.append({"folder": path.parent.name, "index_sha256": sha256_of(path),
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
        elif (path.stat().st_size, sha256_of(path)) != (file["bytes"], file["sha256"]):
            yield f"{path} is not the file of {INDEX}"
    sums = dict(line.split("  ", 1)[::-1] for line in (folder / SUMS).read_text().splitlines())
    if set(sums) != named | {INDEX}:
        yield f"{folder / SUMS} names other files than {INDEX}"
    yield from (f"{folder / name} is not the file of {SUMS}" for name, digest in sums.items()
                if (folder / name).is_file() and sha256_of(folder / name) != digest)


def main(words):
    parser = argparse.ArgumentParser(
        prog="python -m oscar_int2 zoo", description="Writes DIR/index.json over the folders in DIR that have one.")
    parser.add_argument("folder", type=pathlib.Path, metavar="DIR")
    parser.add_argument("--check", action="store_true",
                        help="write nothing, compare and look at every hash; exit with 1 and say what differs")
    arguments = parser.parse_args(words)
    stored = arguments.folder / INDEX
    if not arguments.check:
        write_json(stored, zoo_of(arguments.folder))
        return 0
    faults = [fault for path in sorted(arguments.folder.glob(f"*/{INDEX}")) for fault in faults_of(path.parent)]
    if not stored.is_file() or json.loads(stored.read_text()) != zoo_of(arguments.folder):
        faults.append(f"{stored} is not of the folders beside it; run python -m oscar_int2 zoo {arguments.folder}")
    print("\n".join(faults) or "published: all files are as indexed")
    return int(bool(faults))
