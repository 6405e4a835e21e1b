#!/usr/bin/env python3
"""Computes content_sha256 of a bundle with h5py, from the text of oscar/bundle/encode.h.

Shares no code with the C++ side or the Python package. As a program: verify_bundle.py FILE... compares the stored hash
with the computed one and exits with 1 when one differs.
"""
import hashlib
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


def datasets_of(file):
    """{path: array} of every dataset of an open h5py.File."""
    found = {}
    file.visititems(lambda name, item: found.__setitem__("/" + name, item[()])
                    if isinstance(item, h5py.Dataset) else None)
    return found


def content_sha256(file):
    """`file`: an open h5py.File. Returns 64 hexadecimal characters."""
    objects = {"/": file}
    file.visititems(lambda name, item: objects.__setitem__("/" + name, item))
    hasher = hashlib.sha256()
    _field(hasher, "oscar-content-1")
    datasets = datasets_of(file)
    for path in sorted(datasets, key=lambda path: path.encode("utf-8")):
        values = np.asarray(datasets[path])
        _field(hasher, "dataset")
        _field(hasher, path)
        _field(hasher, DTYPES[values.dtype.str])
        _field(hasher, ",".join(str(extent) for extent in values.shape))
        _field(hasher, values.tobytes())
    for path in sorted(objects, key=lambda path: path.encode("utf-8")):
        attributes = objects[path].attrs
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
