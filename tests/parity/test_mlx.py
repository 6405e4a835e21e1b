"""Rows that this toolkit codes for mlx-lm, read by MLX's own 2-bit kernels on the CPU.

The tensors are those that mlx-lm's QuantizedKVCache holds of a layer: codes as uint32 [1, heads,
tokens, d / 16], scales and biases [1, heads, tokens, groups].
"""
import subprocess
import unittest

import numpy as np

from support.programs import BIN, ProgramTest

try:
    import mlx.core as mx
except ImportError:
    mx = None

HEADS, TOKENS, QUERIES = 2, 96, 3


@unittest.skipIf(mx is None, "mlx is not installed: scripts/setup.sh --tests")
class Mlx(ProgramTest):
    def coded(self, rows, ratio):
        """(codes, scales, biases) for MLX, and the rows as this toolkit reads them."""
        d = rows.shape[-1]
        source, out = self.folder / "rows.npz", self.folder / "coded.npz"
        np.savez(source, rows=rows.reshape(-1, d))
        subprocess.run([BIN / "oscar-test-code-rows", "mlx", str(ratio), source, out], check=True)
        found = np.load(out)
        shape = rows.shape[:-1]
        codes = found["codes"].astype(np.uint8).view(np.uint32).reshape(1, *shape, d // 16)
        scales = found["scale"].reshape(1, *shape, 1)
        biases = -found["zero"].reshape(1, *shape, 1) * scales  # a bias is a minimum
        return (tuple(map(mx.array, (codes, scales, biases))), found["read"].reshape(1, *rows.shape))

    def test_its_quantized_attention_is_that_of_our_reference(self):
        rng = np.random.default_rng(0)
        for d in (64, 128):
            with self.subTest(d):
                keys, values = rng.standard_normal((2, HEADS, TOKENS, d)).astype(np.float32)
                queries = rng.standard_normal((1, HEADS, QUERIES, d)).astype(np.float32)
                (k, k_read), (v, v_read) = self.coded(keys, .96), self.coded(values, .92)
                options = {"group_size": d, "bits": 2}
                scores = mx.quantized_matmul(mx.array(queries) / np.sqrt(d), *k, transpose=True,
                                             **options)
                by_mlx = mx.quantized_matmul(mx.softmax(scores, axis=-1), *v, transpose=False,
                                             **options)
                logits = queries.astype(float) @ k_read.transpose(0, 1, 3, 2) / np.sqrt(d)
                weights = np.exp(logits - logits.max(-1, keepdims=True))
                ours = weights / weights.sum(-1, keepdims=True) @ v_read
                difference = np.abs(np.array(by_mlx) - ours).max()
                self.assertLess(difference, 1e-5 * np.abs(ours).max())
                # Codes of a row and of the next one are not alike: a wrong order would not pass.
                turned = np.array(mx.dequantize(*k, **options))[..., ::-1]
                self.assertGreater(np.abs(turned - k_read).max(), .5)

    def test_each_value_comes_back_as_we_read_it(self):
        rows = np.random.default_rng(1).standard_normal((HEADS, TOKENS, 128)).astype(np.float32)
        coded, read = self.coded(rows, .96)
        by_mlx = np.array(mx.dequantize(*coded, group_size=128, bits=2))
        np.testing.assert_allclose(by_mlx, read, rtol=0, atol=1e-6)


if __name__ == "__main__":
    unittest.main()
