#!/usr/bin/env python3
"""Fails when a lower layer of lib/oscar includes a higher one, or a kernel anything but the cache.

Each folder of lib/oscar is a layer; a folder within a folder (model/checkpoint) may lie lower than what is
around it.
"""
import pathlib
import re
import sys

# Lowest first. A layer may include itself and those before it.
LAYERS = (
    "cache", "base", "io", "text", "model/checkpoint", "fit", "bundle", "eval/report", "model",
    "attention", "calibrate/search", "calibrate", "eval",
)
TORCH_FROM = KERNELS_FROM = LAYERS.index("model")  # includes of torch, of oscar_kernels/
SUFFIXES = (".h", ".cpp", ".cuh", ".cu", ".in", ".inc")
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^">]+)[">]', re.MULTILINE)


def sources(root: pathlib.Path) -> list[pathlib.Path]:
    return [path for path in sorted(root.rglob("*")) if path.suffix in SUFFIXES]


def includes(path: pathlib.Path) -> list[str]:
    return INCLUDE.findall(path.read_text(encoding="utf-8"))


def layer(path: str) -> int | None:
    """Of a file, by the layer it lies in."""
    for parent in pathlib.PurePosixPath(path).parents:
        if str(parent) in LAYERS:
            return LAYERS.index(str(parent))
    return None


def library_problems(root: pathlib.Path) -> list[str]:
    problems = []
    for path in sources(root):
        name = path.relative_to(root).as_posix()
        own = layer(name)
        if own is None:
            problems.append(f"{path}: in no layer of {', '.join(LAYERS)}")
            continue
        for included in includes(path):
            first, _, rest = included.partition("/")
            if first in ("torch", "ATen", "c10", "cuda_runtime.h") and own < TORCH_FROM:
                if not (LAYERS[own] == "cache" and first == "cuda_runtime.h"):
                    problems.append(f"{path}: {included} below {LAYERS[TORCH_FROM]}")
            if first == "oscar_kernels" and own < KERNELS_FROM:
                problems.append(f"{path}: {included} below {LAYERS[KERNELS_FROM]}")
            if first == "oscar" and "/" in rest:
                other = layer(rest)
                if other is None or other > own:
                    problems.append(f"{path}: {LAYERS[own]} includes {included}, which lies above")
    return problems


def kernel_problems(root: pathlib.Path) -> list[str]:
    """Kernels know the cache's structs; their torch operators also errors and a stable ABI."""
    problems = []
    for path in sources(root):
        in_operators = path.is_relative_to(root / "torch")
        allowed = ("oscar/cache/", "oscar/base/") if in_operators else ("oscar/cache/",)
        for included in includes(path):
            if included.startswith("oscar/") and not included.startswith(allowed):
                problems.append(f"{path}: {included} is above {' and '.join(allowed)}")
            if included.startswith(("torch/", "ATen/", "c10/")):
                if not in_operators or not included.startswith("torch/csrc/stable/"):
                    problems.append(f"{path}: {included} is not torch's stable ABI")
    return problems


def main() -> int:
    top = pathlib.Path(__file__).resolve().parent.parent
    problems = library_problems(top / "lib" / "oscar") + kernel_problems(top / "kernels")
    print("\n".join(problems) if problems else "layers: every include points down")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
