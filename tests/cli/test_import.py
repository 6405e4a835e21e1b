"""oscar-bundle import: published files and a researcher's own, evaluated under their own names."""
import io
import json
import pickle
import unittest
import zipfile

import h5py
import numpy as np
import torch
from safetensors.numpy import save_file

from bundle.verify_bundle import datasets_of
from support.backends import HEAD_DIM, BackendCase
from support.checkpoints import QWEN3_MINI, qwen3_tensors, write_checkpoint
from support.exchange import load_export, random_rotation

LAYERS, HEADS = 3, 2


class Import(BackendCase):
    def take(self, *files, options=()):
        out = self.folder / "imported.h5"
        self.run_ok("oscar-bundle", "import", *files, "--model", self.model, "-o", out, "--force",
                    "--sink", 8, "--recent", 16, *options)
        self.run_ok("oscar-bundle", "verify", out)
        return out

    def refuse_import(self, *files, words):
        self.refuse("oscar-bundle", ["import", *files, "--model", self.model, "-o",
                                     self.folder / "never.h5"], *words)

    def rotations(self, *shape, seed=0):
        rng = np.random.default_rng(seed)
        count = int(np.prod(shape))
        flat = np.stack([random_rotation(HEAD_DIM, rng) for _ in range(count)])
        return flat.reshape(*shape, HEAD_DIM, HEAD_DIM).astype(np.float32)

    def write_torch(self, name, matrices, **extra):
        """The published layout, as torch writes it."""
        per_head = matrices.ndim == 4
        layers = {i: {"layer_id": i, "rotation": torch.from_numpy(m.copy())}
                  for i, m in enumerate(matrices)}
        path = self.folder / name
        torch.save({"format_version": 2 if per_head else 1, "objective": "x", "layers": layers,
                    "source_grouping": "per_kv_head" if per_head else "layer"} | extra, path)
        return path

    def check_stored(self, bundle, keys, values):
        with h5py.File(bundle) as file:
            for i, layer in enumerate(file["layers"].values()):
                for name, matrices in (("k_rotation", keys), ("v_rotation", values)):
                    np.testing.assert_array_equal(
                        layer[name][()], np.broadcast_to(matrices[i], (HEADS, HEAD_DIM, HEAD_DIM)))
                np.testing.assert_array_equal(layer["k_mean"][()], 0)
                np.testing.assert_allclose(layer["k_clip_ratio"][()], .96, atol=1e-6)
                np.testing.assert_allclose(layer["v_clip_ratio"][()], .92, atol=1e-6)

    def test_published_files_become_a_bundle_and_the_same_files_again(self):
        for backend, shape in (("sglang-v1", (LAYERS,)), ("sglang-v2", (LAYERS, HEADS)),
                             ("vllm-pr46774", (LAYERS,))):
            with self.subTest(backend):
                keys, values = self.rotations(*shape), self.rotations(*shape, seed=1)
                files = [self.write_torch("k_x.pt", keys, calibration={"tokens": 30000, "x": 1.5}),
                         self.write_torch("v_x.pt", values)]
                bundle = self.take(*reversed(files), options=["--for", backend])
                self.check_stored(bundle, keys, values)
                self.assertEqual(self.backend(bundle, backend)["line"], "runs as is")
                out = self.folder / backend
                self.run_ok("oscar-bundle", "export", bundle, "--for", backend, "-o", out)
                again = load_export(backend, out)
                for side, matrices in (("k", keys), ("v", values)):
                    for i in range(LAYERS):
                        np.testing.assert_array_equal(again[side][i][0], matrices[i].reshape(
                            -1, HEAD_DIM, HEAD_DIM))
                self.check_stored(self.take(out, options=["--for", backend]), keys, values)

    def test_an_export_keeps_its_clipping(self):
        for backend in ("sglang-v1", "sglang-v2", "vllm-pr46774"):
            bundle = self.calibrate("--for", backend, "--search", "off", "--clip", ".9,.85")
            out = self.folder / backend
            self.run_ok("oscar-bundle", "export", bundle, "--for", backend, "-o", out)
            for options, pair in (((), (.9, .85)), (("--clip", ".97,.94"), (.97, .94))):
                with self.subTest(backend, options=options), h5py.File(
                        self.take(out, options=["--for", backend, *options])) as file:
                    for side, ratio in zip("kv", pair):
                        found = [layer[f"{side}_clip_ratio"][()] for layer in file["layers"].values()]
                        np.testing.assert_allclose(found, ratio, atol=1e-6)

    def test_a_folder_with_transforms_of_two_kinds_is_refused(self):
        folder = self.folder / "several"
        folder.mkdir()
        keys = self.rotations(LAYERS)
        for name in ("a.npz", "b.npz"):
            np.savez(folder / name, k_rotation=keys, v_rotation=keys)
        self.refuse_import(folder, words=["a.npz, b.npz", "name those that are meant"])
        (folder / "b.npz").unlink()
        self.take(folder)
        self.write_torch("several/k_x.pt", keys)
        self.refuse_import(folder, words=["a.npz, k_x.pt"])

    def test_a_folder_of_mlx_holds_transposes(self):
        keys, values = self.rotations(LAYERS, HEADS), self.rotations(LAYERS, HEADS, seed=1)
        folder = self.folder / "mlx"
        folder.mkdir()
        for side, matrices in (("k", keys), ("v", values)):
            save_file({f"layer_{i}": m.transpose(0, 2, 1).copy() for i, m in enumerate(matrices)},
                      folder / f"{side}_rotation.safetensors")
        bundle = self.take(folder, options=["--for", "mlx", "--quant-group-size", 32])
        self.check_stored(bundle, keys, values)
        out = self.folder / "again"
        self.run_ok("oscar-bundle", "export", bundle, "--for", "mlx", "-o", out)
        again = load_export("mlx", out)
        for i in range(LAYERS):
            np.testing.assert_array_equal(again["k"][i][0], keys[i])
        self.run_ok("oscar-bundle", "verify", folder, "--for", "mlx")

    def test_what_vllm_reads_besides_is_read_too(self):
        keys, values = self.rotations(LAYERS), self.rotations(LAYERS, seed=1)
        torch.save({str(i): torch.from_numpy(m) for i, m in enumerate(keys)}, self.folder / "k.pt")
        torch.save(torch.from_numpy(values).double(), self.folder / "v.pt")
        self.check_stored(self.take(self.folder / "k.pt", self.folder / "v.pt"), keys, values)

    def test_own_matrices_need_be_neither_orthogonal_nor_centered(self):
        rng = np.random.default_rng(0)
        keys = self.rotations(LAYERS, HEADS)
        keys[1, 1] *= np.exp(rng.uniform(-1, 1, HEAD_DIM)).astype(np.float32)[:, None]
        values = self.rotations(LAYERS, seed=1)
        mean = rng.standard_normal((LAYERS, HEADS, HEAD_DIM)).astype(np.float32)
        clip = np.array([.9, .95, 1], np.float32)
        path = self.folder / "mine.npz"
        np.savez(path, k_rotation=keys, v_rotation=np.asfortranarray(values), k_mean=mean,
                 k_clip_ratio=clip)
        bundle = self.take(path, options=["--name", "mine"])
        with h5py.File(bundle) as file:
            self.assertEqual(file.attrs["method"], b"mine")
            self.assertEqual(file.attrs["preset"], b"imported")
            source = json.loads(file["corpus"].attrs["sources"])[0]
            self.assertEqual(source["name"], "mine.npz")
            layer = file["layers/001"]
            self.assertEqual(list(layer["k_kind"][()]), [2, 3])
            np.testing.assert_array_equal(layer["k_mean"][()], mean[1])
            np.testing.assert_allclose(layer["k_clip_ratio"][()], .95, atol=1e-6)
            numbers = datasets_of(file)
            product = numbers["/layers/001/q_rotation"][1].astype(float).T @ layer["k_rotation"][1]
            np.testing.assert_allclose(product, np.eye(HEAD_DIM), atol=1e-5)
            self.assertNotIn("/layers/000/q_rotation", numbers)
            np.testing.assert_array_equal(layer["v_rotation"][0], values[1])

    def test_all_of_a_bundle_travels_as_arrays_and_back(self):
        bundle = self.calibrate("--no-statistics")
        for form in ("npz", "safetensors"):
            with self.subTest(form):
                out = self.folder / form
                self.run_ok("oscar-bundle", "export", bundle, "--for", form, "-o", out)
                back = self.take(out)
                with h5py.File(bundle) as a, h5py.File(back) as b:
                    numbers, returned, compared = datasets_of(a), datasets_of(b), 0
                    for name in a["layers"]:
                        for part in ("k_rotation", "v_rotation", "q_rotation", "o_rotation",
                                     "k_mean", "k_clip_ratio", "k_feedback", "k_metric",
                                     "k_scale_correction", "k_centres", "v_feedback"):
                            path = f"/layers/{name}/{part}"
                            if path in numbers:
                                np.testing.assert_array_equal(numbers[path], returned[path])
                                compared += 1
                    self.assertGreater(compared, 20)

    def clips(self, bundle):
        with h5py.File(bundle) as file:
            return tuple(round(float(file[f"layers/001/{side}_clip_ratio"][0]), 4) for side in "kv")

    def test_an_import_with_statistics_begins_where_the_recipe_does(self):
        sums, fitted, path = self.calibrate(), self.folder / "fitted.h5", self.folder / "mine.npz"
        self.run_ok("oscar-bundle", "fit", sums, "-o", fitted)
        keys = self.rotations(LAYERS, HEADS)
        np.savez(path, k_rotation=keys, v_rotation=keys)
        self.assertEqual(self.clips(self.take(path)), (.96, .92))
        self.assertEqual(self.clips(self.take(path, options=["--statistics", sums])), self.clips(fitted))
        for options, expected in ((["--rounding", "plain"], (.96, .92)), (["--clip", ".9,.8"], (.9, .8))):
            self.assertEqual(self.clips(self.take(path, options=["--statistics", sums, *options])), expected)
        np.savez(path, k_rotation=keys, v_rotation=keys, k_clip_ratio=np.full(LAYERS, .95))
        self.assertEqual(self.clips(self.take(path, options=["--statistics", sums])), (.95, .92))

    def test_sums_of_other_windows_or_of_even_rows_are_warned_of_as_in_a_fit(self):
        path, out = self.folder / "mine.npz", self.folder / "written.h5"
        np.savez(path, k_rotation=self.rotations(LAYERS), v_rotation=self.rotations(LAYERS, seed=1))
        attended, even = self.calibrate("--statistics-only"), self.folder / "even.h5"
        self.run_ok("oscar-calibrate", "--device", "cpu", self.model, self.corpus, even, "--sequence-length", 256, "--sink", 8,
                    "--recent", 16, "--row-weights", "even", "--statistics-only")

        def said_of(command, sums, *options):
            words = [command, sums] if command == "fit" else [command, path, "--model", self.model, "--statistics", sums]
            said = self.run_ok("oscar-bundle", *words, "-o", out, "--force", *options).stderr
            with h5py.File(out) as file:
                return " ".join(said.split()), file.attrs["row_weights"]
        windows = ["--sink", 8, "--recent", 16]
        for command in ("fit", "import"):
            with self.subTest(command):
                said, weights = said_of(command, attended, *windows)
                self.assertEqual(weights, b"attention")
                self.assertNotIn("collected", said)
                self.assertIn("were collected with --recent 16, and the bundle is for --recent 32",
                              said_of(command, attended, "--sink", 8, "--recent", 32)[0])
                said, weights = said_of(command, even, *windows)
                self.assertEqual(weights, b"even")
                self.assertIn("layers 0 to 2: all rows count alike", said)

    def test_matrices_of_another_size_are_measured_as_rotations_are(self):
        keys, path, kl = self.rotations(LAYERS, HEADS), self.folder / "mine.npz", {}
        for factor in (1, .5, 1e-6, 1e6):
            np.savez(path, k_rotation=keys * np.float32(factor), v_rotation=keys * np.float32(factor))
            out, report = self.folder / f"{factor}.h5", self.folder / "report.json"
            said = self.run_ok("oscar-bundle", "import", path, "--model", self.model, "-o", out, "--sink", 8, "--recent", 16).stderr
            self.assertEqual("far from the size of a rotation" in said, factor not in (1, .5), said)
            self.run_ok("oscar-bundle", "verify", out)
            with h5py.File(out) as file:
                stored = file["layers/001/k_rotation"][()]
            power = np.log2(np.linalg.norm(stored) / np.linalg.norm(keys[1] * factor))
            self.assertAlmostEqual(power, round(power), places=4)
            if factor in (1, .5):  # to the bit, but for bf16 where it is no rotation
                np.testing.assert_allclose(stored, keys[1] * factor, rtol=5e-3, atol=1e-3)
            self.run_ok("oscar-eval", self.model, "--device", "cpu", "--bundle", f"x={out}", "--corpus", self.corpus, "--sequence-length", 256,
                        "--max-tokens", 2048, "--quiet", "--json", report, "--compare", "x", "--separators", "off", "--force")
            kl[factor] = json.loads(report.read_text())["methods"]["x"]["kl"]["mean"]
        for factor in (.5, 1e-6, 1e6):
            self.assertLess(abs(kl[factor] / kl[1] - 1), .1, kl)

    def test_hostile_files_are_refused_with_a_message(self):
        good = self.write_torch("v_good.pt", self.rotations(LAYERS))
        bad = self.folder / "k_bad.pt"

        class Runs:
            def __reduce__(self):
                return (print, ("this ran",))
        torch.save({"layers": {0: Runs()}}, bad)
        self.refuse_import(bad, good, words=["foreign name", "__builtin__ print", "k_bad.pt"])
        torch.save({"layers": {0: torch.nn.Linear(2, 2)}}, bad)
        self.refuse_import(bad, good, words=["foreign name", "torch.nn"])
        torch.save({"layers": {0: np.float64(3)}}, bad)
        self.refuse_import(bad, good, words=["foreign name", "numpy"])
        bad.write_bytes(pickle.dumps({"layers": {}}, protocol=2))
        self.refuse_import(bad, good, words=["no zip archive"])
        bad.write_bytes(good.read_bytes()[:-30])
        self.refuse_import(bad, good, words=["k_bad.pt"])
        with zipfile.ZipFile(bad, "w") as archive:
            archive.writestr("../k/data.pkl", "x")
        self.refuse_import(bad, good, words=["no plain relative path"])
        with zipfile.ZipFile(bad, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("k/data.pkl", b"\0" * 1000000)
        self.refuse_import(bad, good, words=["compressed"])
        state = io.BytesIO()
        pickle.dump({"layers": {0: []}}, state, protocol=4)
        with zipfile.ZipFile(bad, "w") as archive:
            archive.writestr("k/data.pkl", state.getvalue())
        self.refuse_import(bad, good, words=["protocol"])
        huge = torch.zeros(1).expand(HEAD_DIM * 4, 4 * HEAD_DIM)
        torch.save({i: huge for i in range(4000)}, bad)
        self.refuse_import(bad, good, words=["k_bad.pt"])

    def test_files_of_another_model_are_refused_with_the_place(self):
        path = self.folder / "mine.npz"
        keys = self.rotations(LAYERS, HEADS)
        singular = keys.copy()
        singular[2, 1, 0] = 0
        empty = keys.copy()
        empty[1] = 0
        twice = keys.copy()
        twice[2, 0, 1] = twice[2, 0, 0]
        infinite = keys.copy()
        infinite[1, 0, 3, 3] = np.inf
        for arrays, words in (
                ({"k_rotation": keys}, ["v_rotation", "missing"]),
                ({"k_rotation": keys[:2], "v_rotation": keys[:2]}, ["layer 2", "missing"]),
                ({"k_rotation": np.concatenate([keys, keys]),
                  "v_rotation": np.concatenate([keys, keys])}, ["more layers", "layer 5"]),
                ({"k_rotation": keys[..., :32, :32], "v_rotation": keys}, ["another model"]),
                ({"k_rotation": np.concatenate([keys, keys], 1), "v_rotation": keys},
                 ["another model", "4 of 64"]),
                ({"k_rotation": keys, "v_rotation": keys, "k_rot": keys}, ["unknown name", "k_rot"]),
                ({"k_rotation": singular, "v_rotation": keys}, ["not orthogonal, and has no inverse", "layer 2, keys, head 1", f"1 of {HEAD_DIM} rows of length 0"]),
                ({"k_rotation": keys, "v_rotation": empty},
                 ["layer 1, values, head 0", f"{HEAD_DIM} of {HEAD_DIM} rows of length 0", "the matrix holds zeros alone"]),
                ({"k_rotation": twice, "v_rotation": keys}, ["layer 2", "a rotation is orthogonal, or has an inverse"]),
                ({"k_rotation": infinite, "v_rotation": keys}, ["not finite", "layer 1"]),
                ({"k_rotation": keys, "v_rotation": keys, "k_clip_ratio": np.full(3, 1.5)},
                 ["clipping ratio"]),
                ({"k_rotation": keys, "v_rotation": keys, "k_scale_correction": np.full(3, 7)},
                 ["unknown code"]),
                ({"k_rotation": keys, "v_rotation": keys, "k_mean": np.zeros((3, 5))},
                 ["k_mean", "wrong shape"])):
            np.savez(path, **arrays)
            with self.subTest(words):
                self.refuse_import(path, words=words)
        np.savez_compressed(path, k_rotation=keys, v_rotation=keys)
        self.refuse_import(path, words=["compressed", "numpy.savez"])
        np.savez(path, k_rotation=np.array([None]), v_rotation=keys)
        self.refuse_import(path, words=["not an array of numbers", "k_rotation"])
        self.refuse_import(self.corpus, words=["no transforms that can be read"])
        self.refuse_import(self.folder / "none.npz", words=["none.npz"])
        np.savez(path, k_rotation=keys, v_rotation=keys)
        self.refuse("oscar-bundle", ["import", path, "--model", self.model, "--name", "a b", "-o",
                                     self.folder / "never.h5"], "can't have this name", code=2)
        self.refuse("oscar-bundle", ["import", path, "--model", self.model, "--for", "vllm-pr46774",
                                     "--metadata-dtype", "fp32", "-o", self.folder / "never.h5"],
                    "--metadata-dtype", code=2)

    def test_an_export_of_other_weights_is_refused_unless_any_are_asked_for(self):
        other = write_checkpoint(self.folder / "other", {"head_dim": HEAD_DIM},
                                 qwen3_tensors(QWEN3_MINI | {"head_dim": HEAD_DIM}, seed=1))
        path = self.folder / "mine.npz"
        np.savez(path, k_rotation=self.rotations(LAYERS), v_rotation=self.rotations(LAYERS, seed=1))
        for backend in ("npz", "safetensors", "mlx", "sglang-v1"):
            with self.subTest(backend):
                out, never, taken = (self.folder / f"{backend}{end}" for end in ("", ".never", ".h5"))
                options = [] if backend in ("npz", "safetensors") else ["--for", backend]
                if backend == "mlx":
                    options += ["--quant-group-size", 32]
                bundle = self.take(path, options=options)
                self.run_ok("oscar-bundle", "export", bundle, "--for", backend, "-o", out)
                with h5py.File(self.take(out)) as file:
                    theirs = file["model"].attrs["weights_fingerprint"].decode()
                files = [file for file in sorted(out.iterdir()) if file.suffix in (".npz", ".pt")]
                for given in [[out]] + [files] * bool(files):
                    self.refuse("oscar-bundle", ["import", *given, "--model", other, "-o", never],
                                "exported from a bundle of other weights", theirs, "oscar-export.json",
                                "--weights any")
                said = self.run_ok("oscar-bundle", "import", out, "--model", other, "-o", taken,
                                   "--weights", "any").stderr
                with h5py.File(taken) as file:
                    self.assertNotEqual(file["model"].attrs["weights_fingerprint"].decode(), theirs)
                    (warning,) = json.loads(file["layers/000"].attrs["warnings"])
                self.assertIn("fitted to other weights", warning)
                self.assertIn(theirs, warning)
                self.assertIn("fitted to other weights", said)
        for command in (["inspect", taken], ["card", taken, "-o", "-"]):
            said = self.run_ok("oscar-bundle", *command).stdout
            self.assertIn("fitted to other weights", said)
            self.assertNotIn("for these weights alone", said)
        # Nor does the warning go with another export: it says whose transforms they are.
        self.run_ok("oscar-bundle", "export", taken, "--for", "npz", "-o", self.folder / "twice")
        self.assertIn("fitted to other weights", (self.folder / "twice/README.md").read_text())
        self.refuse("oscar-bundle", ["import", self.folder / "twice", "--model", other, "-o", never],
                    "exported from a bundle of other weights", theirs)
        with h5py.File(self.take(self.folder / "twice")) as file:  # the model that they were fitted to
            self.assertNotIn("warnings", file["layers/000"].attrs)
        (out / "oscar-export.json").unlink()  # of unknown origin
        self.run_ok("oscar-bundle", "import", out, "--model", other, "-o", self.folder / "foreign.h5")

    def exported(self, backend, *options):
        path, out = self.folder / "mine.npz", self.folder / "export"
        np.savez(path, k_rotation=self.rotations(LAYERS), v_rotation=self.rotations(LAYERS, seed=1))
        bundle = self.take(path, options=["--for", backend, *options])
        self.run_ok("oscar-bundle", "export", bundle, "--for", backend, "-o", out)
        return out

    def test_an_export_of_a_bundle_with_another_rope_is_refused(self):
        out = self.exported("sglang-v1")
        config = {"head_dim": HEAD_DIM, "rope_parameters": {"rope_type": "default", "rope_theta": 77777.0}}
        other = write_checkpoint(self.folder / "theta", config | {"rope_theta": 77777.0},
                                 qwen3_tensors(QWEN3_MINI | {"head_dim": HEAD_DIM}))
        yarn = '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}'
        for model, options in ((other, []), (self.model, ["--rope-scaling", yarn])):
            self.refuse("oscar-bundle", ["import", out, "--model", model, "--weights", "any", *options, "-o",
                                         self.folder / "never.h5"], "with another RoPE", "oscar-export.json")
        manifest = out / "oscar-export.json"
        said = json.loads(manifest.read_text())
        del said["created_from"]["rope"]  # of an earlier version
        manifest.write_text(json.dumps(said))
        self.assertIn("does not say with which RoPE", self.run_ok(
            "oscar-bundle", "import", out, "--model", self.model, "-o", self.folder / "old.h5").stderr)

    def test_an_export_keeps_its_cache_but_for_what_is_given(self):
        out = self.exported("mlx", "--demote-block", 4, "--quant-group-size", 32)
        for options, expected in (([], (8, 16, 4, 32, b"fp16")),
                                  (["--recent", 32, "--metadata-dtype", "bf16"], (8, 32, 4, 32, b"bf16")),
                                  (["--for", "sglang-v1", "--sink", 12], (12, 16, 4, 64, b"fp32"))):
            self.run_ok("oscar-bundle", "import", out, "--model", self.model, "-o",
                        self.folder / "again.h5", "--force", *options)
            with h5py.File(self.folder / "again.h5") as file:
                kept = file["quantizer"].attrs
                self.assertEqual(tuple(kept[name] for name in (
                    "sink_tokens", "recent_tokens", "demote_block", "quant_group_size", "metadata_dtype")),
                    expected)

    def test_files_are_those_of_the_manifest_beside_them(self):
        out = self.exported("sglang-v1")
        (keys, values), manifest = sorted(out.glob("*.pt")), out / "oscar-export.json"
        said, apart = manifest.read_text(), self.folder / "v_apart.pt"
        apart.write_bytes(values.read_bytes())
        self.refuse_import(keys, apart, words=["files of two folders"])
        matrices = keys.read_bytes(), values.read_bytes()
        keys.write_bytes(matrices[1])
        self.refuse_import(out, words=["has changed since it was exported", keys.name,
                                       "without oscar-export.json"])
        keys.write_bytes(matrices[0])
        for text, words in (("{}", ["not the manifest of an export"]),
                            ("[]", ["not the manifest of an export"]),
                            (json.dumps(json.loads(said) | {"recent_tokens": -1}),
                             ["not a size of a cache", "recent_tokens 1 to"]),
                            (json.dumps(json.loads(said) | {"files": {}}),
                             ["a file that the manifest does not name"])):
            manifest.write_text(text)
            self.refuse_import(out, words=words)
        manifest.unlink()
        self.take(out)

    def test_an_own_random_rotation_is_evaluated_beside_ours_in_two_commands(self):
        ours = self.calibrate()
        path = self.folder / "random.npz"
        np.savez(path, k_rotation=self.rotations(LAYERS, HEADS),
                 v_rotation=self.rotations(LAYERS, HEADS, seed=1))
        mine = self.take(path, options=["--name", "random"])
        report = self.folder / "report.json"
        self.run_ok("oscar-eval", self.model, "--bundle", ours, "--bundle", f"random={mine}",
                    "--corpus", self.corpus, "--sequence-length", 256, "--max-tokens", 2048, "--quiet",
                    "--json", report, "--compare", "identity,random-clip,bundle,random")
        methods = json.loads(report.read_text())["methods"]
        self.assertGreater(methods["random"]["kl"]["mean"], 0)
        # Two random rotations cost about the same; ours costs less.
        ratio = methods["random"]["kl"]["mean"] / methods["random-clip"]["kl"]["mean"]
        self.assertTrue(.5 < ratio < 2, ratio)
        self.assertLess(methods["bundle"]["kl"]["mean"], methods["random"]["kl"]["mean"])


if __name__ == "__main__":
    unittest.main()
