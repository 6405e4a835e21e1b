#!/usr/bin/env python3
"""Fails when a lower layer of lib/oscar includes a higher one, or a kernel anything but the cache.

Each folder of lib/oscar is one layer.
"""
import pathlib
import re
import sys

# Lowest first. A folder may include itself and those before it.
FOLDERS = (
    "cache", "base", "linalg", "io", "checkpoint", "data", "fit", "bundle", "stacks", "exchange",
    "fold", "inspect", "report", "model", "executor", "int2", "search", "calibrate", "eval",
)
LAYER_OF_FOLDER = {folder: layer for layer, folder in enumerate(FOLDERS)}
TORCH_FROM_LAYER = LAYER_OF_FOLDER["model"]
KERNELS_FROM_LAYER = LAYER_OF_FOLDER["model"]  # includes of oscar_kernels/
SUFFIXES = (".h", ".cpp", ".cuh", ".cu", ".in", ".inc")
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^">]+)[">]', re.MULTILINE)


def sources(root: pathlib.Path) -> list[pathlib.Path]:
    return [path for path in sorted(root.rglob("*")) if path.suffix in SUFFIXES]


def includes(path: pathlib.Path) -> list[str]:
    return INCLUDE.findall(path.read_text(encoding="utf-8"))


def library_problems(root: pathlib.Path) -> list[str]:
    problems = []
    for path in sources(root):
        folder = path.relative_to(root).parts[0]
        layer = LAYER_OF_FOLDER.get(folder)
        if layer is None:
            problems.append(f"{path}: folder '{folder}' belongs to no layer")
            continue
        for included in includes(path):
            parts = included.split("/")
            if parts[0] in ("torch", "ATen", "c10", "cuda_runtime.h") and layer < TORCH_FROM_LAYER:
                if not (folder == "cache" and parts[0] == "cuda_runtime.h"):
                    problems.append(f"{path}: {included} below the model layer")
            if parts[0] == "oscar_kernels" and layer < KERNELS_FROM_LAYER:
                problems.append(f"{path}: {included} below layer {KERNELS_FROM_LAYER}")
            if parts[0] == "oscar" and len(parts) > 2:
                other = LAYER_OF_FOLDER.get(parts[1])
                if other is None or other > layer:
                    problems.append(f"{path}: layer {layer} includes {included} of layer {other}")
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
