"""Our readers of safetensors and .npy beside the packages safetensors and numpy, on thousands of
files with a few bytes changed. What both accept holds the same numbers; where one accepts and the
other refuses, a rule listed here says why."""
import collections
import io
import json
import random
import re
import struct
import subprocess
import unittest
import warnings

import numpy
import safetensors
from support.programs import BIN, ENVIRONMENT, ProgramTest

CHANGED = 3000  # files of each format


def changed(rng, good, words):
    """`good` after one to three changes: a byte, a bit, a cut, a repetition, another word."""
    data = bytearray(good)
    for _ in range(rng.choice((1, 1, 2, 3))):
        kind, at = rng.randrange(6), rng.randrange(len(data) or 1)
        if kind == 0:
            data[at:at + 1] = bytes([rng.randrange(256)])
        elif kind == 1 and data:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del data[at:at + rng.randrange(1, 9)]
        elif kind == 3:
            data[at:at] = data[at:at + rng.randrange(1, 9)]
        elif kind == 4:
            data[at:at] = rng.choice(words)
        else:
            places = [(i, word) for word in words for i in [data.find(word)] if i >= 0]
            if places:
                i, word = rng.choice(places)
                data[i:i + len(word)] = rng.choice(words)
    return bytes(data)


# Files in two parts, each of which is changed: a header, whose length is that of the changed one
# in every other file, and the data.
def safetensors_file(header, data, length=None):
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def npy_file(header, data, length=None):
    length = len(header) if length is None else length
    return b"\x93NUMPY\1\0" + struct.pack("<H", length) + header + data


def good_safetensors():
    yield json.dumps({"a": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]},
                      "b": {"dtype": "BF16", "shape": [3], "data_offsets": [8, 14]},
                      "__metadata__": {"format": "pt"}}).encode(), bytes(range(14))
    yield json.dumps({"x": {"dtype": "I64", "shape": [], "data_offsets": [0, 8]},
                      "e": {"dtype": "U8", "shape": [0, 4], "data_offsets": [8, 8]},
                      "h": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [8, 12]}}
                     ).encode(), bytes(range(12))


def good_npy():
    for array in (numpy.arange(6, dtype="<i4").reshape(2, 3), numpy.arange(5, dtype=">i2"),
                  numpy.asfortranarray(numpy.arange(6, dtype="u1").reshape(3, 2))):
        out = io.BytesIO()
        numpy.save(out, array)
        whole = out.getvalue()
        size = 10 + struct.unpack("<H", whole[8:10])[0]
        yield whole[10:size], whole[size:]


SAFETENSORS_WORDS = [b"F32", b"F16", b"U8", b"I64", b"BOOL", b"dtype", b"shape", b"data_offsets",
                     b"__metadata__", b"0", b"8", b"12", b"[", b"]", b"{", b"}", b",", b":", b'"',
                     b"-1", b"1e3", b"null", b" ", b"18446744073709551616"]
NPY_WORDS = [b"<i4", b">i2", b"|u1", b"<u8", b"=i4", b"<f4", b"|b1", b"True", b"False", b"descr",
             b"fortran_order", b"shape", b"(", b")", b",", b"'", b":", b"2", b"3", b"L", b" ",
             b"-1", b"1_0", b"{", b"}"]


# What one reader accepts and the other does not: words of the refusal, and why it is right.
SAFETENSORS_WE_TAKE = {
    r"unknown variant": "a type that the format does not have is listed, and refused when read",
}
SAFETENSORS_THEY_TAKE = {}
NPY_WE_TAKE = {}
NPY_THEY_TAKE = {
    r"not integers|floats|structured": "only integers are token ids",
    r"dimensions": "only 1-D and 2-D arrays are token ids",
    r"truncated or too long": "bytes behind the values mean a damaged file",
}


class Readers(ProgramTest):
    def ours(self, kind, files):
        paths = []
        for number, data in enumerate(files):
            paths.append(self.folder / f"{number}")
            paths[-1].write_bytes(data)
        result = subprocess.run([BIN / "oscar-test-read-arrays", kind], capture_output=True,
                                input="".join(f"{path}\n" for path in paths).encode(),
                                env=ENVIRONMENT, timeout=600)
        self.assertEqual(result.returncode, 0, result.stderr)
        lines = [json.loads(line) for line in result.stdout.splitlines()]
        self.assertEqual(len(lines), len(files))
        return lines

    def files(self, make, good, words):
        rng = random.Random(20)
        good = list(good)
        made = [make(*parts) for parts in good]
        for number in range(CHANGED):
            header, data = rng.choice(good)
            length = None if number % 2 else len(header)
            if rng.randrange(4):
                header = changed(rng, header, words)
            else:
                data = changed(rng, data, words)
            made.append(make(header, data, length))
        return made

    def compare(self, kind, files, theirs_of, same, we_take, they_take):
        """`we_take` and `they_take` have a rule for each file that one reader alone accepts."""
        both, rules = 0, collections.Counter()
        for data, ours in zip(files, self.ours(kind, files)):
            try:
                theirs, refusal = theirs_of(data), ""
            except Exception as error:  # of classes of their own
                theirs, refusal = None, str(error)
            with self.subTest(data=data, ours=ours, refusal=refusal):
                if theirs is None and "refused" not in ours:
                    rules[self.rule(we_take, refusal)] += 1
                elif theirs is not None and "refused" in ours:
                    rules[self.rule(they_take, ours["refused"])] += 1
                elif theirs is not None:
                    both += 1
                    self.assertTrue(same(data, theirs, ours), theirs)
        print(f"{kind}: {len(files)} files, {both} read by both alike, {dict(rules)}")
        self.assertGreater(both, CHANGED // 20)

    def rule(self, rules, text):
        for words, rule in rules.items():
            if re.search(words, text):
                return rule
        self.fail("no rule for this difference")

    def test_safetensors_files_that_were_changed_are_read_alike_or_refused_by_a_rule(self):
        def same(data, theirs, ours):
            found = {name: [dtype, shape, data[begin:begin + size]]
                     for name, (dtype, shape, begin, size) in ours["tensors"].items()}
            return found == theirs

        files = self.files(safetensors_file, good_safetensors(), SAFETENSORS_WORDS)
        self.compare(
            "safetensors", files,
            lambda data: {name: [tensor["dtype"], list(tensor["shape"]), bytes(tensor["data"])]
                          for name, tensor in safetensors.deserialize(data)}, same,
            we_take=SAFETENSORS_WE_TAKE, they_take=SAFETENSORS_THEY_TAKE)

    def test_npy_files_that_were_changed_are_read_alike_or_refused_by_a_rule(self):
        def theirs(data):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of headers written by Python 2
                return numpy.load(io.BytesIO(data), allow_pickle=False)

        def same(data, array, ours):
            return (list(array.shape) == ours["shape"]
                    and array.astype("i8").ravel().tolist() == ours["values"])

        files = self.files(npy_file, good_npy(), NPY_WORDS)
        self.compare("npy", files, theirs, same, we_take=NPY_WE_TAKE, they_take=NPY_THEY_TAKE)


if __name__ == "__main__":
    unittest.main()
