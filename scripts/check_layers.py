#!/usr/bin/env python3
"""Fails when a lower layer of lib/oscar or kernels includes a higher one.

The order is that of lib/CMakeLists.txt; folders of one layer may include each other.
"""
import pathlib
import re
import sys

LAYER_OF_FOLDER = {
    "cache": 0,
    "base": 1, "io": 1, "data": 1, "linalg": 1, "fit": 1, "bundle": 1, "report": 1,
    "model": 2,
    "int2": 3,
    "calibrate": 4, "eval": 4,
}
TORCH_FROM_LAYER = 2
KERNELS_FROM_LAYER = 3  # includes of oscar_kernels/
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^">]+)[">]', re.MULTILINE)


def main() -> int:
    root = pathlib.Path(__file__).resolve().parent.parent / "lib" / "oscar"
    problems = []
    for path in sorted(root.rglob("*")):
        if path.suffix not in (".h", ".cpp", ".cuh", ".cu", ".in"):
            continue
        folder = path.relative_to(root).parts[0]
        layer = LAYER_OF_FOLDER.get(folder)
        if layer is None:
            problems.append(f"{path}: folder '{folder}' belongs to no layer")
            continue
        for included in INCLUDE.findall(path.read_text(encoding="utf-8")):
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
    print("\n".join(problems) if problems else "layers: every include points down or sideways")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
