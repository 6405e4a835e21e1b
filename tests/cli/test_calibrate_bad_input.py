"""oscar-calibrate on bad input: a clear message, the right exit code and no file left behind."""
import json
import os
import subprocess
import time
import unittest

import numpy as np

from support import checkpoints
from support.bundle_case import make_file
from support.programs import BIN, ENVIRONMENT, ProgramTest, run


class BadInput(ProgramTest):
    def setUp(self):
        super().setUp()
        self.model = checkpoints.write_checkpoint(self.folder / "model")
        self.corpus = self.folder / "corpus.txt"
        self.corpus.write_text("".join(checkpoints.sample_text()))
        self.out = self.folder / "out.h5"

    def refused(self, *words, corpus=None, out=None, options=(), code=1):
        arguments = [self.model, corpus or self.corpus, out or self.out]
        if "--device" not in options:
            arguments += ["--device", "cpu"]
        self.refuse("oscar-calibrate", [*arguments, *options], *words, code=code)

    def write_config(self, **changes):
        (self.model / "config.json").write_text(json.dumps(checkpoints.QWEN3_MINI | changes))

    def test_an_existing_output_needs_force(self):
        self.out.write_bytes(b"mine")
        self.refused("exists already", "--force")
        self.assertEqual(self.out.read_bytes(), b"mine")

    def test_a_missing_or_truncated_shard(self):
        shard = self.model / "model.safetensors"
        whole = shard.read_bytes()
        shard.write_bytes(whole[:-1000])
        self.refused("model.safetensors")
        shard.unlink()
        self.refused("safetensors")

    def test_a_missing_misshapen_or_nan_tensor_is_named(self):
        name = "model.layers.1.self_attn.k_proj.weight"
        for change, word in ((lambda t: t.pop(name), "missing"),
                             (lambda t: t.update({name: t[name][:-1].copy()}), "shape"),
                             (lambda t: t[name].__setitem__((3, 4), np.nan), "finite")):
            tensors = checkpoints.qwen3_tensors(checkpoints.QWEN3_MINI)
            change(tensors)
            checkpoints.write_checkpoint(self.model, tensors=tensors)
            with self.subTest(word):
                # A file is named unless none holds the tensor.
                place = "model" if word == "missing" else "model/model.safetensors"
                self.refused(f"{place}: {name}", word)
        tensors = checkpoints.qwen3_tensors(checkpoints.QWEN3_MINI)
        tensors["model.norm.weight"][5] = np.inf  # no statistic depends on it
        checkpoints.write_checkpoint(self.model, tensors=tensors)
        self.refused("model/model.safetensors: model.norm.weight", "finite")
        tensors = checkpoints.qwen3_tensors(checkpoints.QWEN3_MINI)
        tensors["model.layers.0.extra"] = tensors["model.norm.weight"]
        checkpoints.write_checkpoint(self.model, tensors=tensors)
        self.refused("model/model.safetensors: model.layers.0.extra", "does not account for")

    def test_nesting_that_would_exhaust_the_stack(self):
        brackets = "[" * 100000 + "]" * 100000
        config = json.dumps(checkpoints.QWEN3_MINI)
        (self.model / "config.json").write_text(f'{config[:-1]}, "extra": {brackets}}}')
        self.refused("config.json", "nested too deeply")
        (self.model / "config.json").write_text(config)
        (self.model / "tokenizer.json").write_text(f'{{"model": {brackets}}}')
        self.refused("tokenizer.json", "nested too deeply")

    def test_configurations_that_cannot_be_run(self):
        for change, word in (({"architectures": ["Gpt9ForCausalLM"], "model_type": "gpt9"},
                              "Gpt9ForCausalLM"),
                             ({"hidden_size": 2**40}, "hidden_size"),
                             ({"num_key_value_heads": 3}, "num_key_value_heads"),
                             ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "longrope")):
            self.write_config(**change)
            with self.subTest(word):
                self.refused(word)
        self.write_config(head_dim=20)
        self.refused("2-bit rows do not hold heads of this size", "a multiple of 8, at most 256", "20", "--statistics-only")

    def test_text_corpora_that_cannot_be_read(self):
        bad = self.folder / "bad.jsonl"
        for content, words in ((b'\n\n{"text": oops}\n', ["bad.jsonl", "no row of the file", "line 3", "column 10"]),
                               (b'{"text": "\xff\xfe"}\n', ["line 1", "UTF-8"]),
                               (b"", ["bad.jsonl"])):
            bad.write_bytes(content)
            with self.subTest(content):
                self.refused(*words, corpus=bad)
        text = self.folder / "bad.txt"
        text.write_bytes(b"good \xc3\x28 bad")
        self.refused("UTF-8", corpus=text)
        self.refused("none.txt", corpus=self.folder / "none.txt")

    def test_token_ids_that_the_model_does_not_have(self):
        ids = self.folder / "ids.npy"
        for array, word in ((np.array([1, 2, 999]), "999"), (np.array([1.5, 2.5]), "float"),
                            (np.array([-1, 2, 3]), "-1"), (np.array([], dtype=np.int32), "empty")):
            np.save(ids, array)
            with self.subTest(word):
                self.refused(word, corpus=ids)

    def test_a_checkpoint_of_another_run(self):
        other = self.folder / "other.txt"
        other.write_text("another corpus " * 20000)
        process = subprocess.Popen([BIN / "oscar-calibrate", "--device", "cpu", self.model, other,
                                    self.out, "--sequence-length", "128", "--checkpoint-every", "1"],
                                   env=ENVIRONMENT, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)  # first, whatever fails below
        while not (self.folder / "out.h5.checkpoint").exists():
            self.assertIsNone(process.poll(), "ended before its first checkpoint")
            time.sleep(0.01)
        process.terminate()
        self.assertEqual(process.wait(timeout=60), 130)
        self.refused("another run", options=["--resume"])

        options = ["--device", "cpu", "--sequence-length", "128", "--checkpoint-every", "1", "--resume"]
        self.write_config(rms_norm_eps=1e-2)  # which is in no weight
        self.refused("another run", "the same weights, config.json", corpus=other, options=options)
        self.write_config()
        self.run_ok("oscar-calibrate", self.model, other, self.out, *options)

    def test_resuming_from_what_is_no_checkpoint_says_what_to_do(self):
        checkpoint = self.folder / "out.h5.checkpoint"
        bundle = make_file(self.folder / "bundle.h5")
        for content, word in ((b"mine", "HDF5"), (bundle.read_bytes(), "no checkpoint")):
            checkpoint.write_bytes(content)
            self.refused("out.h5.checkpoint", word, "start anew", options=["--resume"])
            self.assertEqual(checkpoint.read_bytes(), content)
        checkpoint.unlink()
        self.out.write_bytes(b"mine")
        self.refused("out.h5", "HDF5", "choose another name", options=["--resume"])
        self.assertEqual(self.out.read_bytes(), b"mine")
        self.out.write_bytes(bundle.read_bytes())
        self.refused("out.h5", "another run", "--force", options=["--resume"])
        self.assertEqual(self.out.read_bytes(), bundle.read_bytes())

    def test_a_corpus_argument_that_means_nothing_is_wrong_usage(self):
        for corpus in (f"{self.corpus}:abc", f"{self.corpus}:-1", f"{self.corpus}:1,{self.corpus}",
                       "self:x"):
            self.refused("CORPUS", "PATH[:WEIGHT]", corpus=corpus, code=2)
        place = self.folder / "a:b"  # a colon before the last slash begins no weight
        place.mkdir()
        named = place / "c.txt"
        named.write_text(self.corpus.read_text())
        self.run_ok("oscar-calibrate", self.model, f"{named}:2", self.out, "--device", "cpu", "--dry-run")

    def test_places_that_cannot_be_written(self):
        self.refused("no/such/folder", out=self.folder / "no/such/folder/out.h5")
        self.refused("/sys/out.h5", "cannot write", out="/sys/out.h5")  # refused to root too
        for option in ("--json", "--tokens-out"):
            place = self.folder / "absent" / "file"
            self.refused("absent/file", "cannot write", options=[option, place])
            # Before the work: the model is not even opened.
            self.refuse("oscar-calibrate", ["none", self.corpus, self.out, option, place],
                        "absent/file", "cannot write")
        script = (f"trap '' XFSZ; ulimit -f 40; exec {BIN}/oscar-calibrate --device cpu "
                  f"{self.model} {self.corpus} {self.out}")
        full = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=ENVIRONMENT)
        self.assertEqual(full.returncode, 1, full.stderr)
        self.assertEqual([path for path in self.folder.iterdir() if "out.h5" in path.name], [])

    @unittest.skipIf(os.geteuid() == 0, "root may write anywhere")
    def test_a_read_only_folder(self):
        self.folder.chmod(0o500)
        self.addCleanup(self.folder.chmod, 0o700)
        self.refused("out.h5")

    def test_numbers_outside_a_range_are_refused_in_few_words(self):
        for option, value in (("--sequence-length", "-1"), ("--recent", "0"), ("--sink", "-5"),
                              ("--max-tokens", "x"), ("--sink", "2147483647"),
                              ("--recent", "16777217"), ("--position-span", "-1")):
            with self.subTest(option=option, value=value):
                result = run("oscar-calibrate", self.model, self.corpus, self.out, option, value)
                self.assertEqual(result.returncode, 2)
                message = result.stderr.splitlines()[0]
                self.assertTrue(message.startswith(f"{option}: must be "), message)
                self.assertIn(f"not {value}", message)
                self.assertLessEqual(len(message), 80)

    def test_positions_that_the_model_does_not_serve(self):
        self.refused("--position-span", "at most 2048", "2049",
                     options=["--position-span", "2049"])
        result = self.run_ok("oscar-calibrate", self.model, self.corpus, self.out, "--device",
                             "cpu", "--dry-run", "--recent", 1984)
        self.assertIn("nothing will ever be quantized", result.stderr)
        result = self.run_ok("oscar-calibrate", self.model, self.corpus, self.out, "--device",
                             "cpu", "--dry-run", "--recent", 1983)
        self.assertNotIn("ever be quantized", result.stderr)

    def test_usage_errors_exit_with_2_and_bad_values_with_1(self):
        self.refuse("oscar-calibrate", [self.model], "CORPUS", code=2)
        self.refused("--method", options=["--method", "magic"], code=2)
        for options in (["--clip", "2,3"], ["--host-memory", "lots"], ["--rope-scaling", "{"]):
            with self.subTest(options):
                self.refused(options[0], options=options, code=2)
        for device, words in (("tpu", "did you mean cpu?"), ("cuda:x", "cuda:INDEX"),
                              ("cudax", "did you mean cuda?"), ("", "auto, cpu, cuda")):
            with self.subTest(device):
                self.refused("--device", words, options=["--device", device], code=2)
        for options in (["--host-memory", "1M"], ["--sequence-length", "4096"]):
            with self.subTest(options):
                self.refused(options[0], options=options)


if __name__ == "__main__":
    unittest.main()
