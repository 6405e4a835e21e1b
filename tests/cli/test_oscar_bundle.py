"""oscar-bundle from outside: files made with h5py, good, worn and hostile."""
import json
import os
import pathlib
import resource
import subprocess
import tempfile
import unittest

import h5py
import numpy as np

from bundle.verify_bundle import content_sha256

PROGRAM = pathlib.Path(os.environ["OSCAR_BIN"]) / "oscar-bundle"
LAYERS, HEADS, DIM = 2, 2, 8
KINDS = {"k": "q", "v": "o"}
STATISTICS = ("q_moment", "k_moment", "v_moment", "attn_out_moment", "o_proj_metric")
SUMS = ("q_sum", "k_sum", "v_sum", "attn_out_sum")


def run(*arguments, **options):
    return subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True,
                          timeout=300, **options)


def rotation(rng):
    """Orthogonal, far from symmetric, and exact in bf16: Hadamard blocks with signs, rolled."""
    block = np.array([[1, 1], [1, -1]])
    block = np.kron(block, block) / 2
    signs = rng.choice([-1, 1], (DIM, 1))
    return np.roll(signs * np.kron(np.eye(DIM // 4), block), 3, axis=1)


def attributes(group, **values):
    for name, value in values.items():
        group.attrs[name] = np.bytes_(value) if isinstance(value, str) else np.int64(value)


def dataset(group, name, value, dtype):
    return group.create_dataset(name, data=np.asarray(value, dtype), chunks=np.shape(value),
                                fletcher32=True)


def add_statistics(layer, rng):
    group = layer.create_group("statistics")
    for name in STATISTICS:
        rows = rng.standard_normal((HEADS, 50, DIM))
        dataset(group, name, rows.transpose(0, 2, 1) @ rows, "<f8")
    for name in SUMS:
        dataset(group, name, rng.standard_normal((HEADS, DIM)), "<f8")
    group["count_q"], group["count_kv"] = np.int64(200), np.int64(100)


def add_transforms(layer, rng):
    for side in KINDS:
        dataset(layer, f"{side}_kind", [2] * HEADS, "u1")
        dataset(layer, f"{side}_rotation", [rotation(rng) for _ in range(HEADS)], "<f4")
        dataset(layer, f"{side}_mean", np.zeros((HEADS, DIM)), "<f4")
        dataset(layer, f"{side}_eigenvalues", np.sort(rng.random((HEADS, DIM))), "<f8")
        dataset(layer, f"{side}_clip_ratio", [0.96] * HEADS, "<f4")
        dataset(layer, f"{side}_scale_correction", [0] * HEADS, "u1")
    dataset(layer, "predicted_output_nmse", [0.01] * HEADS, "<f8")


def seal(file):
    file.attrs["content_sha256"] = np.bytes_(content_sha256(file))


def make_file(path, statistics_only=False, seed=0, with_seal=True):
    rng = np.random.default_rng(seed)
    with h5py.File(path, "w") as file:
        attributes(file, format="oscar-statistics" if statistics_only else "oscar-rotation-bundle",
                   format_version=1, required_features="[]", tool_version="0", tool_commit="0",
                   created_utc="2026-01-01T00:00:00Z", preset="paper", method="oscar",
                   objective_k="qtq", objective_v="sv", composition="r_h_pbr",
                   granularity="per-head", position_span=0, fit_seed=0)
        attributes(file.create_group("model"), name="m", architecture="Qwen3ForCausalLM",
                   num_layers=LAYERS, num_qo_heads=4, num_kv_heads=HEADS, head_dim_k=DIM,
                   head_dim_v=DIM, hidden_size=32, config_sha256="c", tokenizer_sha256="t",
                   chat_template_sha256="", weights_fingerprint="w",
                   rope='{"rope_type": "default", "rope_theta": 1e4, "max_positions": 64}')
        source = {"name": f"corpus {seed}", "sha256": f"{seed:064x}", "weight": 1}
        attributes(file.create_group("corpus"), sources=json.dumps([source]), sequences_read=2,
                   sequences_used=2, tokens=100, chunk_len=64, order_seed=0,
                   tokens_sha256=f"{seed + 1000:064x}", bos_eos_policy="none", template="none")
        attributes(file.create_group("quantizer"), bits=2, quant_group_size=DIM, sink_tokens=64,
                   recent_tokens=256, demote_block=1, metadata_dtype="fp16",
                   clip_span="head_row", zero="code_units")
        for number in range(LAYERS):
            layer = file.create_group(f"layers/{number:03}")
            attributes(layer, layer_id=number, attention="full", num_kv_heads=HEADS,
                       head_dim_k=DIM, head_dim_v=DIM, quantized=1)
            add_statistics(layer, rng)
            if not statistics_only:
                add_transforms(layer, rng)
        if with_seal:
            seal(file)
    return path


class BundleCase(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def expect_refused(self, path, *words):
        """verify, inspect and strip all fail with the words, and nothing is written."""
        before = sorted(os.listdir(self.folder))
        out = self.folder / "never.h5"
        for command in (("verify", path), ("inspect", path), ("strip", path, out)):
            result = run(*command)
            text = result.stdout + result.stderr
            self.assertEqual(result.returncode, 1, text)
            for word in words:
                self.assertIn(word, text, command[0])
        self.assertEqual(sorted(os.listdir(self.folder)), before)

    def changed(self, change, reseal=True):
        path = make_file(self.folder / "changed.h5")
        with h5py.File(path, "r+") as file:
            change(file)
            if reseal:
                seal(file)
        return path


class GoodFiles(BundleCase):
    def test_a_file_written_by_another_program_is_sound(self):
        path = make_file(self.folder / "a.h5")
        result = run("verify", path)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertIn("is sound", result.stdout)
        report = json.loads(run("verify", path, "--json").stdout)
        self.assertTrue(report["ok"])
        self.assertGreaterEqual(len(report["findings"]), 5)

    def test_strip_keeps_every_number_in_row_major_order(self):
        path = make_file(self.folder / "a.h5")
        out = self.folder / "b.h5"
        self.assertEqual(run("strip", path, out).returncode, 0)
        with h5py.File(path) as a, h5py.File(out) as b:
            for number in range(LAYERS):
                mine, theirs = a[f"layers/{number:03}"], b[f"layers/{number:03}"]
                self.assertNotIn("statistics", theirs)
                for name in mine:
                    if name != "statistics":
                        np.testing.assert_array_equal(mine[name][()], theirs[name][()])
                        self.assertEqual(mine[name].dtype, theirs[name].dtype)
                        self.assertTrue(theirs[name].fletcher32)
                matrix = theirs["k_rotation"][0]
                self.assertGreater(np.abs(matrix - matrix.T).max(), 0.1)
            self.assertEqual(b.attrs["content_sha256"].decode(), content_sha256(b))
        self.assertEqual(run("verify", out).returncode, 0)

    def test_inspect_shows_the_quantizer_cost_within_80_columns(self):
        path = make_file(self.folder / "a.h5")
        result = run("inspect", path)
        self.assertEqual(result.returncode, 0, result.stderr)
        lines = [line for line in result.stdout.splitlines() if str(self.folder) not in line]
        self.assertLessEqual(max(map(len, lines)), 80)
        data = json.loads(run("inspect", path, "--json").stdout)
        bits = 2 + 2 * 16 / DIM
        for context in (8192, 32768, 131072):
            expected = (16 * 320 + bits * (context - 320)) / context
            self.assertAlmostEqual(data["bits_per_element"][str(context)], expected, places=12)
        with h5py.File(path) as file:
            values = file["layers/001/k_eigenvalues"][0]
        share = data["layers"][1]["key"]["largest_eigenvalue_share"][0]
        self.assertAlmostEqual(share, values[-1] / values.sum(), places=12)

    def test_inspect_tells_rounding_by_head(self):
        factors = np.stack([np.eye(DIM), np.eye(DIM)])
        factors[1, 0, DIM - 1] = 0.25
        path = self.changed(lambda f: dataset(f["layers/001"], "k_feedback", factors, "<f4"))
        layer = json.loads(run("inspect", path, "--json").stdout)["layers"][1]
        self.assertEqual(layer["key"]["rounding"] + layer["value"]["rounding"],
                         ["plain", "shaped", "plain", "plain"])

    def test_control_characters_do_not_reach_the_terminal(self):
        path = self.changed(lambda f: attributes(f["model"], name="\x1b[2Jname"))
        result = run("inspect", path)
        self.assertIn("?[2Jname", result.stdout)
        self.assertNotIn("\x1b", result.stdout)

    def test_unknown_names_are_ignored_but_hashed(self):
        path = self.changed(lambda f: dataset(f.create_group("later"), "x", [1.0], "<f4"))
        self.assertEqual(run("verify", path).returncode, 0)

    def test_help_fits_80_columns(self):
        for arguments in ((), ("inspect",), ("verify",), ("strip",), ("merge",), ("diff",)):
            result = run(*arguments, "--help")
            self.assertEqual(result.returncode, 0)
            self.assertLessEqual(max(map(len, result.stdout.splitlines())), 80, result.stdout)

    def test_wrong_usage_exits_with_2(self):
        for arguments in ((), ("unknown",), ("inspect",), ("merge", "a", "b"), ("diff", "a")):
            self.assertEqual(run(*arguments).returncode, 2, arguments)

    def test_diff_names_what_differs(self):
        a = make_file(self.folder / "a.h5")
        b = self.changed(lambda f: f["layers/001/k_clip_ratio"].__setitem__(0, 0.5))
        same = run("diff", a, a, "--exit-code")
        self.assertEqual((same.returncode, same.stdout), (0, "equal\n"))
        result = run("diff", a, b)
        self.assertEqual(result.returncode, 0)
        self.assertIn("/layers/001/k_clip_ratio: 1 of 2 elements differ", result.stdout)
        self.assertEqual(run("diff", a, b, "--exit-code").returncode, 1)


class Merging(BundleCase):
    def test_sums_and_counts_add_and_both_corpora_are_listed(self):
        a = make_file(self.folder / "a.h5", statistics_only=True, seed=1)
        b = make_file(self.folder / "b.h5", seed=2)
        out = self.folder / "c.h5"
        result = run("merge", a, b, "-o", out)
        self.assertEqual(result.returncode, 0, result.stderr)
        with h5py.File(a) as x, h5py.File(b) as y, h5py.File(out) as z:
            self.assertEqual(z.attrs["format"], b"oscar-statistics")
            for number in range(LAYERS):
                p, q, r = (f[f"layers/{number:03}/statistics"] for f in (x, y, z))
                for name in STATISTICS[:4] + SUMS + ("count_q", "count_kv"):
                    np.testing.assert_array_equal(r[name][()], p[name][()] + q[name][()])
            names = [s["name"] for s in json.loads(z["corpus"].attrs["sources"])]
            self.assertEqual(names, ["corpus 1", "corpus 2"])
            self.assertEqual(z["corpus"].attrs["tokens"], 200)
        self.assertEqual(run("verify", out).returncode, 0)

    def test_the_same_corpus_twice_needs_force(self):
        a = make_file(self.folder / "a.h5", statistics_only=True)
        out = self.folder / "c.h5"
        result = run("merge", a, a, "-o", out)
        self.assertEqual(result.returncode, 1)
        self.assertIn("counted twice", result.stderr)
        self.assertFalse(out.exists())
        self.assertEqual(run("merge", a, a, "-o", out, "--force").returncode, 0)

    def test_other_models_and_stripped_files_are_refused(self):
        a = make_file(self.folder / "a.h5", statistics_only=True, seed=1)
        other = self.changed(lambda f: attributes(f["model"], weights_fingerprint="x"))
        stripped = self.folder / "s.h5"
        run("strip", make_file(self.folder / "b.h5", seed=2), stripped)
        out = self.folder / "c.h5"
        for path, word in ((other, "weights_fingerprint"), (stripped, "no statistics")):
            result = run("merge", a, path, "-o", out)
            self.assertEqual(result.returncode, 1)
            self.assertIn(word, result.stderr)
            self.assertFalse(out.exists())


class Refusals(BundleCase):
    def test_damage(self):
        path = make_file(self.folder / "a.h5")
        whole = path.read_bytes()
        for length in (0, 100, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:length])
            self.expect_refused(path, "cut short")
        with h5py.File(make_file(path)) as file:
            place = file["layers/000/k_rotation"].id.get_chunk_info(0).byte_offset
        flipped = bytearray(whole)
        flipped[place + 5] ^= 1
        path.write_bytes(flipped)
        self.expect_refused(path, "/layers/000/k_rotation", "checksum")

    def test_changes_after_writing(self):
        path = self.changed(lambda f: attributes(f, method="identity"), reseal=False)
        self.expect_refused(path, "content_sha256")

    def test_versions_and_features(self):
        self.expect_refused(self.changed(lambda f: attributes(f, format_version=2)), "version")
        self.expect_refused(
            self.changed(lambda f: attributes(f, required_features='["mirrors"]')), "mirrors")
        self.expect_refused(self.changed(lambda f: attributes(f, format="other")), "format")

    def test_names_shapes_types_and_values(self):
        def replace(path, value, dtype):
            def change(file):
                del file[path]
                if value is not None:
                    dataset(file, path, value, dtype)
            return change

        key = "layers/001/k_mean"
        nan = np.zeros((HEADS, DIM))
        nan[1, 2] = np.nan
        for value, dtype, word in ((None, None, "missing"),
                                   (np.zeros((HEADS, DIM + 1)), "<f4", "shape"),
                                   (np.zeros((HEADS, DIM)), "<f8", "dtype"),
                                   (np.zeros((HEADS, DIM)), ">f4", "type"),
                                   (nan, "<f4", "not finite")):
            # A big-endian type is refused before the hash is looked at.
            path = self.changed(replace(key, value, dtype), reseal=dtype != ">f4")
            self.expect_refused(path, "/" + key, word)
        self.expect_refused(self.changed(replace("layers/000/k_kind", [2, 9], "u1")), "k_kind")
        self.expect_refused(self.changed(lambda f: f["model"].attrs.__delitem__("rope")), "rope")
        self.expect_refused(self.changed(lambda f: f.__delitem__("layers/001")), "layers")

    def test_a_matrix_that_is_no_rotation_is_found(self):
        path = self.changed(lambda f: f["layers/001/v_rotation"].__setitem__((0, 0, 0), 0.25))
        result = run("verify", path)
        self.assertEqual(result.returncode, 1)
        self.assertIn("/layers/001 values", result.stdout)
        self.assertEqual(run("strip", path, self.folder / "b.h5").returncode, 1)
        self.assertFalse((self.folder / "b.h5").exists())

    def test_hostile_files(self):
        (self.folder / "secret").write_bytes(b"\0" * 4096)
        make_file(self.folder / "other.h5")

        def virtual(file):
            layout = h5py.VirtualLayout((HEADS, DIM), "<f4")
            layout[:] = h5py.VirtualSource(str(self.folder / "other.h5"), "layers/000/k_mean",
                                           (HEADS, DIM))
            file.create_virtual_dataset("x", layout)

        def external(file):
            file.create_dataset("x", (16,), "<f4",
                                external=[(str(self.folder / "secret"), 0, 64)])

        def hard_cycle(file):
            file["model/again"] = file["/"]

        def second_name(file):
            file["layers/000/again"] = file["layers/000/k_mean"]

        def huge(file):
            file.create_dataset("x", (1 << 40, 1 << 20), "<f8", chunks=(1, 1024))

        def bomb(file):
            file.create_dataset("x", (1 << 28,), "<f8", chunks=(1024,), compression="gzip")

        def deep(file):
            file.create_group("/".join(["g"] * 40))

        def soft(file):
            file["x"] = h5py.SoftLink("/model")

        def external_link(file):
            file["x"] = h5py.ExternalLink("other.h5", "/model")

        def lzf(file):
            file.create_dataset("x", data=np.zeros(16, "<f4"), compression="lzf")

        def text(file):
            file["x"] = "variable-length text"

        def compound(file):
            file["x"] = np.zeros(2, [("a", "<f4"), ("b", "<i4")])

        def reference(file):
            file["x"] = file["model"].ref

        def wide_chunk(file):
            file.create_dataset("x", (1 << 20, 1 << 10), "<f8", chunks=(1 << 18, 1 << 10))

        def text_attribute(file):
            file["model"].attrs["more"] = "variable-length text"

        for change, word in ((virtual, "virtual"), (external, "external storage"),
                             (hard_cycle, "two names"), (second_name, "two names"),
                             (huge, "/x"), (bomb, "/x"), (deep, "too deeply"),
                             (soft, "soft links"), (external_link, "external links"),
                             (lzf, "lzf"), (text, "element type"), (compound, "compound"),
                             (reference, "reference"), (wide_chunk, "absurd"),
                             (text_attribute, "variable-length")):
            with self.subTest(change.__name__):
                self.expect_refused(self.changed(change, reseal=False), word)

    def test_outputs_are_not_replaced_without_force(self):
        path = make_file(self.folder / "a.h5")
        out = self.folder / "b.h5"
        out.write_text("precious")
        result = run("strip", path, out)
        self.assertEqual(result.returncode, 1)
        self.assertIn("--force", result.stderr)
        self.assertEqual(out.read_text(), "precious")
        self.assertEqual(run("strip", path, out, "--force").returncode, 0)

    def test_a_full_disk_leaves_no_file(self):
        path = make_file(self.folder / "a.h5")
        out = self.folder / "b.h5"
        # A file size limit fails the same write calls that a full disk does. Python ignores
        # SIGXFSZ, and its children do so too unless signals are restored.
        limit = 8192
        result = run("strip", path, out, restore_signals=False,
                     preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
        self.assertEqual(result.returncode, 1, result.stderr)
        self.assertIn("cannot", result.stderr)
        self.assertEqual(os.listdir(self.folder), ["a.h5"])

    def test_unwritable_and_missing_places_are_named(self):
        path = make_file(self.folder / "a.h5")
        result = run("strip", path, self.folder / "absent" / "b.h5")
        self.assertEqual(result.returncode, 1)
        self.assertIn("absent/b.h5", result.stderr)
        result = run("inspect", self.folder / "none.h5")
        self.assertEqual(result.returncode, 1)
        self.assertIn("no such file", result.stderr)


if __name__ == "__main__":
    unittest.main()
