#!/usr/bin/env python3
"""A rotation of your own against the default: PCA of keys and values, written the same way, judged on the same text.

    python/examples/compare_rotation.py tiny-gqa datasets/tiny-gqa/calibration.jsonl datasets/tiny-gqa/heldout.jsonl OUT

OUT gets the two bundles and, where matplotlib is installed, kl.png.
"""
import pathlib
import sys

import numpy as np

import oscar_int2


def pca(statistics: dict, side: str) -> np.ndarray:
    """[layers, Hkv, d, d]: eigenvectors of each head's covariance as columns. `side`: "k" or "v"."""
    found = []
    for sums in statistics.values():
        mean = sums[f"{side}_sum"] / sums["count_kv"]
        found.append(np.linalg.eigh(sums[f"{side}_moment"] / sums["count_kv"] - mean[:, :, None] * mean[:, None, :])[1])
    return np.stack(found)


def main(model, calibration, heldout, out, tokens=65536):
    out = pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    default = oscar_int2.calibrate(model, calibration, out / "default.h5", max_tokens=tokens, force=True)
    sums = default.statistics()
    own = oscar_int2.import_rotation(pca(sums, "k"), pca(sums, "v"), model, out / "pca.h5", statistics=default.path, force=True)
    found = oscar_int2.evaluate(model, {"default": default, "pca": own}, corpus=heldout, max_tokens=tokens,
                                compare=["bf16", "hadamard-clip", "pca", "default"], separators="off")
    print(found)
    rows = [row for row in found.rows() if row["metric"] == "kl" and row["position"] is not None]
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    for method in found.methods[1:]:
        line = [(row["position"], row["mean"]) for row in rows if row["method"] == method]
        pyplot.semilogy(*zip(*line), label=method)
    pyplot.xlabel("position")
    pyplot.ylabel("KL to BF16, nats a token")
    pyplot.legend()
    pyplot.savefig(out / "kl.png", dpi=120)
    print(f"wrote {out / 'kl.png'}")


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    main(*sys.argv[1:])
