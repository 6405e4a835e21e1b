#!/usr/bin/env python3
"""Computes content_sha256 of a bundle with h5py, from the texts of oscar/bundle/content_hash.h and,
for what a file leaves out, oscar/bundle/derived.h.

Shares no code with the C++ side or the Python package. As a program: verify_bundle.py FILE... compares the stored hash
with the computed one and exits with 1 when one differs.
"""
import hashlib
import json
import struct
import sys

import h5py
import numpy as np

DTYPES = {"|u1": "u8", "<i4": "i32", "<i8": "i64", "<f4": "f32", "<f8": "f64"}


def _field(hasher, data):
    if isinstance(data, str):
        data = data.encode("utf-8")
    hasher.update(struct.pack("<Q", len(data)))
    hasher.update(data)


def _attribute(value):
    if isinstance(value, bytes):  # np.bytes_ is one; padding is already gone
        return "str", value
    if isinstance(value, str):
        return "str", value.encode("utf-8")
    if isinstance(value, np.int64):
        return "i64", struct.pack("<q", int(value))
    if isinstance(value, np.float64):
        return "f64", struct.pack("<d", float(value))
    raise TypeError(f"attribute of type {type(value)}")


def _inverse(matrix):
    a, swaps = matrix.astype(np.float64), []
    for k in range(len(a)):
        best = k + int(np.argmax(np.abs(a[k:, k])))
        swaps.append((k, best))
        a[[k, best]] = a[[best, k]]
        pivot, a[k, k] = a[k, k], 1.0
        a[k] = a[k] / pivot
        others = np.arange(len(a)) != k
        factors = a[others, k]
        a[others, k] = 0.0
        a[others] = a[others] - factors[:, None] * a[k]
    for k, best in reversed(swaps):
        a[:, [k, best]] = a[:, [best, k]]
    return a.astype(np.float32)


def _factor(metric):
    m = metric.astype(np.float64)
    damping = 0.01 * _mean_diagonal(m)
    for i in range(len(m)):
        m[i, i] += damping
    u = np.eye(len(m))
    for j in reversed(range(len(m))):
        column = m[:j, j].copy()
        u[:j, j] = column / m[j, j]
        m[:j, :j] = m[:j, :j] - u[:j, j, None] * column  # read above the diagonal only
    return u.astype(np.float32)


def _mean_diagonal(m):
    total = 0.0
    for i in range(len(m)):
        total += m[i, i]
    return total / len(m)


def _product(a, b):
    c = np.zeros_like(a)
    for k in range(len(b)):
        c = c + a[:, k, None] * b[k]
    return c


def _output_metric(partner, weight):
    p = partner.astype(np.float64)
    product = _product(_product(p, weight), p.T.copy())
    symmetric = 0.5 * (product + product.T)
    mean = _mean_diagonal(symmetric)
    return (symmetric / mean if mean > 0 else np.eye(len(p))).astype(np.float32)


def _inverses(stack, kinds, keys):
    found = []
    for matrix, kind in zip(stack, kinds):
        inverse = _inverse(matrix) if kind == 3 else matrix.T
        found.append(inverse.T if keys else inverse)
    return np.stack(found)


def _mirrored(rows):
    d = next(d for d in range(1, rows.shape[1] + 1) if d * (d + 1) // 2 == rows.shape[1])
    full = np.empty((len(rows), d, d), rows.dtype)
    for matrix, values in zip(full, rows):
        place = 0
        for i in range(d):
            matrix[i, i:] = matrix[i:, i] = values[place:place + d - i]
            place += d - i
    return full


def _derived(found, group, name, coding):
    side = {"q": "k", "o": "v"}.get(name[0], name[0])
    if coding == "factor":
        return np.stack([_factor(m) for m in found[f"{group}/{side}_metric"]])
    rotations = found[f"{group}/{side}_rotation"]
    if coding == "output_metric":
        partners = found.get(f"{group}/o_rotation", rotations.swapaxes(1, 2))
        weights = found[f"{group}/statistics/o_proj_metric"]
        return np.stack([_output_metric(p, w) for p, w in zip(partners, weights)])
    return _inverses(rotations, found[f"{group}/{side}_kind"], side == "k")


def whole(file):
    """{path: array} of every dataset of an open h5py.File, with those that it leaves out."""
    found, codings, groups = {}, [], [("", file)]
    while groups:
        path, group = groups.pop()
        for name, coding in json.loads(group.attrs.get("coding", b"{}")).items():
            codings.append((path, name, coding))
        for name, item in group.items():
            if isinstance(item, h5py.Group):
                groups.append((f"{path}/{name}", item))
            else:
                found[f"{path}/{name}"] = item[()]
    order = ["upper", "inverse", "output_metric", "factor"]
    for group, name, coding in sorted(codings, key=lambda entry: order.index(entry[2])):
        place = f"{group}/{name}"
        if coding == "upper":
            found[place] = _mirrored(found[place])
            continue
        values = _derived(found, group, name, coding)
        if place in found:
            values = (values.view(np.uint32) + found[place].view(np.uint32)).view(np.float32)
        found[place] = values
    return found


def content_sha256(file):
    """`file`: an open h5py.File. Returns 64 hexadecimal characters."""
    objects = {"/": file}
    file.visititems(lambda name, item: objects.__setitem__("/" + name, item))
    hasher = hashlib.sha256()
    _field(hasher, "oscar-content-1")
    datasets = whole(file)
    for path in sorted(datasets, key=lambda path: path.encode("utf-8")):
        values = np.asarray(datasets[path])
        _field(hasher, "dataset")
        _field(hasher, path)
        _field(hasher, DTYPES[values.dtype.str])
        _field(hasher, ",".join(str(extent) for extent in values.shape))
        _field(hasher, values.tobytes())
    features = json.loads(file.attrs["required_features"])
    stored_whole = "derived" not in features
    for path in sorted(objects, key=lambda path: path.encode("utf-8")):
        attributes = dict(objects[path].attrs)
        if not stored_whole:
            attributes.pop("coding", None)
            if path == "/":
                others = [name for name in features if name != "derived"]
                attributes["required_features"] = json.dumps(others, separators=(",", ":"))
        for name in sorted(attributes, key=lambda text: text.encode("utf-8")):
            left_out = name in ("content_sha256", "created_utc") or name.startswith("tool_")
            if path == "/" and left_out:
                continue
            kind, value = _attribute(attributes[name])
            for part in ("attribute", path, name, kind, value):
                _field(hasher, part)
    return hasher.hexdigest()


def main(paths):
    failed = False
    for path in paths:
        with h5py.File(path, "r") as file:
            stored = file.attrs["content_sha256"].decode()
            computed = content_sha256(file)
        print(f"{path}: {'agrees' if stored == computed else f'{stored} but {computed}'}")
        failed |= stored != computed
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
