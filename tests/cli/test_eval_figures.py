#!/usr/bin/env python3
"""What a report says by position and by head, against the means that it says besides, and its pictures."""
import json
import unittest

import numpy as np

from support.stacks import StackCase


class EvalFigures(StackCase):
    def test_parts_of_a_mean_add_up_to_it(self):
        bundle, report, page = self.calibrate("--search", "off"), self.folder / "r.json", self.folder / "r.html"
        self.run_ok("oscar-eval", self.model, "--bundle", bundle, "--corpus", self.corpus, "--chunk-len", 512,
                    "--max-tokens", 2048, "--separators", "off", "--compare", "hadamard,bundle,bundle@k",
                    "--json", report, "--html", page)
        found = json.loads(report.read_text())
        edges = np.array(found["positions"])
        self.assertEqual((edges[0], edges[-1]), (found["first_position"], found["longest_sequence"]))
        self.assertEqual(len(edges), 1 + found["tokens"] // 256)
        widths = np.diff(edges)  # sequences are of one length: tokens of a stretch are in proportion
        self.assertEqual(found["tokens"], found["sequences"] * widths.sum())
        for name in ("hadamard", "bundle", "bundle@k"):
            method = found["methods"][name]
            parts = np.array(method["kl"]["by_position"])
            self.assertEqual(len(set(parts)), len(widths))
            self.assertAlmostEqual(parts @ widths / widths.sum() / method["kl"]["mean"], 1, delta=1e-9)
            heads = np.array(method["output_nmse_heads"])
            self.assertEqual(heads.shape, (3, 2))
            for layer, mean in zip(heads, method["output_nmse"]):
                self.assertLess(layer.min(), mean)
                self.assertGreater(layer.max(), mean)
        self.assertNotIn("output_nmse_heads", found["methods"]["bf16"])
        for title in ("What each bit buys", "Whether it grows along a sequence",
                      "Error of the attention output, head by head"):
            self.assertIn(title, page.read_text())


if __name__ == "__main__":
    unittest.main()
