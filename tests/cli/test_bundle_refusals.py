"""oscar-bundle on damaged, foreign and hostile files, and places that can't be written."""
import os
import resource
import unittest

import h5py
import numpy as np

from support.bundle_case import DIM, HEADS, BundleCase, attributes, dataset, make_file, run
from support.programs import SOURCE


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

    def test_a_kind_of_attention_that_no_program_fits_is_refused_by_name(self):
        path = self.changed(lambda f: attributes(f["layers/001"], attention="mla"))
        self.expect_refused(path, "unknown kind of attention", "full, sliding, local or none", "mla")

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

    def test_losses_of_clipping_ratios_that_make_no_sense(self):
        good = {"tried": ([.96, .9, 0], "<f4"), "nmse": (np.full((3, HEADS), .1), "<f8")}

        def losses(**changes):
            def change(file):
                for name, (value, dtype) in (good | changes).items():
                    if value is not None:
                        dataset(file["layers/001"], f"k_clip_{name}", value, dtype)
            return change

        def with_one(row, column, value):
            nmse = np.full((3, HEADS), .1)
            nmse[row, column] = value
            return nmse, "<f8"

        self.assertEqual(run("verify", self.changed(losses())).returncode, 0)
        for changes, words in (
                ({"tried": ([.96, .9, 1.01], "<f4")}, ("k_clip_tried", "a ratio of 1.01")),
                ({"tried": ([.96, -.1, 0], "<f4")}, ("k_clip_tried", "a ratio of -0.1")),
                ({"tried": ([.96, .9, .96], "<f4")}, ("k_clip_tried", "0.96 twice")),
                ({"tried": ([0, .9, -0.], "<f4")}, ("k_clip_tried", "twice")),
                ({"tried": ([.96, np.nan, 0], "<f4")}, ("k_clip_tried", "not finite")),
                ({"tried": ([.96, .9, 0], "<f8")}, ("k_clip_tried", "dtype")),
                ({"tried": ([[.96, .9, 0]], "<f4")}, ("k_clip_tried", "shape")),
                ({"tried": (np.linspace(0, 1, 1025), "<f4")}, ("k_clip_tried", "shape")),
                ({"tried": (None, None)}, ("k_clip_tried", "missing")),
                ({"nmse": (None, None)}, ("k_clip_nmse", "missing")),
                ({"nmse": (np.full((2, HEADS), .1), "<f8")}, ("k_clip_nmse", "shape")),
                ({"nmse": (np.full((3, HEADS + 1), .1), "<f8")}, ("k_clip_nmse", "shape")),
                ({"nmse": (np.full((3, HEADS), .1), "<f4")}, ("k_clip_nmse", "dtype")),
                ({"nmse": with_one(2, 1, np.inf)}, ("k_clip_nmse", "not finite")),
                ({"nmse": with_one(1, 0, -1e-9)}, ("k_clip_tried", "a loss of -1e-09"))):
            with self.subTest(changes=changes):
                self.expect_refused(self.changed(losses(**changes)), "/layers/001", *words)

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

    def test_unknown_words_are_refused_with_the_known_ones_and_numbers_too(self):
        path, out = make_file(self.folder / "a.h5"), self.folder / "out"
        for command, option, known in ((["fold", path, "tiny-gqa", out], "--value-mean", "auto,fold,keep,drop"),
                                       (["strip", path, out], "--profile", "publish,serving")):
            for wrong in ("foo", "0", "1", "3"):
                with self.subTest(option=option, wrong=wrong):
                    result = run(*command, option, wrong)
                    self.assertEqual(result.returncode, 2, result.stderr)
                    self.assertIn(f"{option}: {wrong} not in {{{known}}}", result.stderr)

    def test_a_full_disk_leaves_no_file(self):
        """Also where the write that fails is that of a thread: of a dataset, not of the end."""
        path = make_file(self.folder / "a.h5")
        out = self.folder / "b.h5"
        # A file size limit fails the same write calls that a full disk does. Python ignores
        # SIGXFSZ, and its children do so too unless signals are restored.
        for bundle, limit in ((path, 8192), (SOURCE / "rotation_zoo/tiny-gqa/tiny-gqa.h5", 65536)):
            with self.subTest(bundle.name):
                result = run(
                    "strip", bundle, out, restore_signals=False,
                    preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
                self.assertEqual(result.returncode, 1, result.stderr)
                self.assertIn("cannot", result.stderr)
                self.assertNotIn("HDF5-DIAG", result.stderr)
                self.assertEqual(os.listdir(self.folder), ["a.h5"])

    def test_unwritable_and_missing_places_are_named(self):
        path = make_file(self.folder / "a.h5")
        result = run("strip", path, self.folder / "absent" / "b.h5")
        self.assertEqual(result.returncode, 1)
        self.assertIn("absent/b.h5", result.stderr)
        self.assertIn(f"hint:     make the folder first: {self.folder / 'absent'}\n", result.stderr)
        result = run("inspect", self.folder / "none.h5")
        self.assertEqual(result.returncode, 1)
        self.assertIn("No such file", result.stderr)


if __name__ == "__main__":
    unittest.main()
