#!/usr/bin/env python3
"""studies/focused_attention.py: rows that are not rounded cost nothing, and shares are those of a direct computation."""
import contextlib
import io
import os
import pathlib
import re
import sys
import tempfile
import types
import unittest
from unittest import mock

import numpy as np
import torch

from serving_case import BUNDLE, MODEL
from oscar_int2.codec import LayerCodec

sys.path.insert(0, str(pathlib.Path(os.environ["OSCAR_SOURCE"], "studies")))
import focused_attention


class FocusedAttention(unittest.TestCase):
    def run_on(self, ids, *options):
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as said:
            path = pathlib.Path(folder, "ids.npy")
            np.save(path, ids)
            focused_attention.main([str(MODEL), str(BUNDLE), str(path), "--device", "cpu", *options])
        lines = [re.split(r"  +", line) for line in said.getvalue().splitlines()]
        return [[float(cell.rstrip("%")) for cell in line[1:]] for line in lines[1:-1]], said.getvalue()

    @classmethod
    def setUpClass(cls):
        cls.ids = np.random.default_rng(0).integers(10, 8000, (1, 640)).astype(np.int32)
        cls.ids[:, 560:] = cls.ids[:, 100:180]  # what was read far back comes again

    def test_shares_are_whole_and_values_cost_where_attention_is_on_one_token(self):
        rows, said = self.run_on(self.ids, "--last", "80")
        self.assertIn("1 rows of 640 tokens, the last 80 queries of each, 240 rows in 2 bits", said)
        for column in range(2):
            self.assertAlmostEqual(sum(row[column] for row in rows), 100, delta=0.05)
        self.assertGreater(rows[-1][0], 0.5)
        self.assertGreater(rows[-1][3], 10 * rows[0][3])

    def test_rows_that_are_not_rounded_cost_nothing(self):
        held = {}

        def append(codec, pages, tables, k, v):
            held[codec.layer_id] = k, v

        def exact(codec, pages, tables, request, history):
            return torch.stack([rows[64:64 + history] for rows in held[codec.layer_id]])

        with mock.patch.object(LayerCodec, "append", append), mock.patch.object(LayerCodec, "read_history", exact):
            rows, _ = self.run_on(self.ids, "--last", "80")
        self.assertEqual({value for row in rows for value in row[2:]}, {0.0})

    def test_attention_over_rows_is_that_of_each_query_alone(self):
        q, k = torch.randn(3, 4, 8), torch.randn(5, 2, 8)
        seen = torch.arange(5) <= torch.tensor([[2], [3], [4]])
        found = focused_attention.attend(types.SimpleNamespace(scaling=0.3, softcap=None, sinks=None), q, k, seen)
        for i, head in ((0, 3), (2, 1)):
            alone = (k[:3 + i, head // 2] @ q[i, head] * 0.3).softmax(0)
            torch.testing.assert_close(found[i, head // 2, head % 2, :3 + i], alone)
            self.assertEqual(found[i, head // 2, head % 2, 3 + i:].sum(), 0)

    def test_rows_too_short_for_it_are_refused(self):
        with self.assertRaisesRegex(SystemExit, "--last 400 leaves no 2-bit row in rows of 640 tokens"):
            self.run_on(self.ids, "--last", "400")


if __name__ == "__main__":
    unittest.main()
