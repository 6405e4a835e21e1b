"""What files say reaches a terminal, and a log, escaped and shortened: names of tensors, values of
configurations, tokenizers, corpora and their file names, chat templates, bundles and reports."""
import json
import os
import pty
import shutil
import subprocess
import unicodedata
import unittest

import h5py
import numpy as np

from support import checkpoints, gguf_files
from support.bundle_case import make_file, seal
from support.programs import BIN, ENVIRONMENT, ProgramTest

# A title, a cleared screen, a colour by a C1 control, writing from right to left, what deletes.
ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\b\x7f\rgnp"
HOSTILE = ESCAPES + "x" * 5000 + "\n" + ESCAPES
SHOWN = 1000  # bytes of one text
ERASE_LINE = "\r\x1b[K"  # before a line of progress


class TerminalText(ProgramTest):
    def setUp(self):
        super().setUp()
        self.text = self.folder / "text.txt"
        self.text.write_text("".join(checkpoints.sample_text(60)))
        self.model = checkpoints.write_checkpoint(self.folder / "model")
        self.out = self.folder / "out.h5"

    def on_terminal(self, program, *arguments):
        """Exit code and what a terminal gets that is standard output and standard error."""
        terminal, side = pty.openpty()
        process = subprocess.Popen([str(BIN / program), *map(os.fspath, arguments)], stdout=side,
                                   stderr=side, stdin=subprocess.DEVNULL, env=ENVIRONMENT)
        os.close(side)
        said = b""
        try:
            while part := os.read(terminal, 65536):
                said += part
        except OSError:  # the other side has been closed
            pass
        os.close(terminal)
        return process.wait(timeout=60), said.decode().replace("\r\n", "\n").replace(ERASE_LINE, "")

    def through_pipes(self, program, *arguments):
        result = subprocess.run([str(BIN / program), *map(os.fspath, arguments)],
                                capture_output=True, env=ENVIRONMENT, timeout=60, check=False)
        return result.returncode, result.stdout.decode() + result.stderr.decode()

    def check(self, said, whole=False):
        """`whole`: data, which are not shortened."""
        obeyed = {c for c in said
                  if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")}
        self.assertEqual(obeyed, set())
        if not whole:
            self.assertNotIn("x" * SHOWN, said)
            self.assertLess(len(said), 20000)

    def expect_told(self, code, program, *arguments, pipes=True, whole=False):
        """The program says the hostile text, made harmless; `pipes`: into a log too."""
        for run in (self.on_terminal, self.through_pipes)[:2 if pipes else 1]:
            found, said = run(program, *arguments)
            self.assertEqual(found, code, said[-3000:])
            self.check(said, whole)
            self.assertIn("owned", said)

    def change_json(self, name, change):
        path = self.model / name
        value = json.loads(path.read_text())
        change(value)
        path.write_text(json.dumps(value))

    def fresh_model(self):
        shutil.rmtree(self.model)
        checkpoints.write_checkpoint(self.model)

    def test_of_a_configuration(self):
        values = {key: {key: HOSTILE} for key in ("model_type", "num_hidden_layers", "head_dim",
                                                  "rms_norm_eps", "rope_theta")}
        values |= {"architectures": {"model_type": "x", "architectures": [HOSTILE]},
                   "rope type": {"rope_scaling": {"rope_type": HOSTILE}},
                   "quantization": {"quantization_config": {"quant_method": HOSTILE}}}
        for name, changes in values.items():
            with self.subTest(name):
                self.fresh_model()
                self.change_json("config.json", lambda config, new=changes: config.update(new))
                # A plan takes weights in any quantization.
                words = (("oscar-calibrate", self.model, self.model / "config.json", self.folder / "out.h5")
                         if name == "quantization" else ("oscar-bundle", "plan", self.model))
                self.expect_told(1, *words)
        name = json.dumps(HOSTILE)
        for case, text in {"a key twice": f"{{{name}: 1, {name}: 2}}",
                           "no JSON": f"{{\"a\": {HOSTILE}}}"}.items():
            with self.subTest(case):
                (self.model / "config.json").write_text(text)
                code, said = self.on_terminal("oscar-bundle", "plan", self.model)
                self.assertEqual(code, 1)
                self.check(said)

    def test_of_weights(self):
        weights, index = self.model / "model.safetensors", self.model / "model.safetensors.index.json"
        whole = weights.read_bytes()
        size = int.from_bytes(whole[:8], "little")
        header = json.loads(whole[8:8 + size])
        first = next(iter(header))

        def write(changed):
            text = json.dumps(changed).encode()
            weights.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + size:])

        entry = header[first]
        headers = {"shape": header | {HOSTILE: {"dtype": "F32", "shape": [7], "data_offsets": [0, 4]}},
                   "type": header | {first: entry | {"dtype": HOSTILE}},
                   "offsets": header | {HOSTILE: entry | {"data_offsets": [0, 1 << 60]}},
                   "no entry": header | {HOSTILE: 1}}
        for name, changed in headers.items():
            with self.subTest(name):
                write(changed)
                self.expect_told(1, "oscar-calibrate", self.model, self.text, self.out, "--dry-run",
                                 pipes=name == "shape")
        weights.unlink()
        weights = self.model / "one.safetensors"
        weights.write_bytes(whole)
        maps = {"tensor": {key: weights.name for key in header} | {HOSTILE: weights.name},
                "file": {key: HOSTILE for key in header}}
        for name, weight_map in maps.items():
            with self.subTest(f"{name} in an index"):
                index.write_text(json.dumps({"weight_map": weight_map}))
                self.expect_told(1, "oscar-calibrate", self.model, self.text, self.out, "--dry-run",
                                 pipes=False)

    def test_of_a_gguf_file(self):
        path = self.folder / "model.gguf"
        kinds = lambda name: gguf_files.Type.F32
        config = checkpoints.QWEN3_MINI | {"model_type": ESCAPES + "x" * 3000}
        gguf_files.write_model(path, config, checkpoints.qwen3_tensors(checkpoints.QWEN3_MINI), kinds,
                               np.random.default_rng(0), paired=False)
        self.expect_told(1, "oscar-bundle", "plan", path)

    def test_of_a_tokenizer(self):
        token = {"id": 0, "content": HOSTILE, "special": True, "normalized": False, "lstrip": False,
                 "rstrip": False, "single_word": False}
        changes = {"model": {"model": {"type": HOSTILE}},
                   "words": {"pre_tokenizer": {"type": HOSTILE}},
                   "normalizer": {"normalizer": {"type": HOSTILE}},
                   "added tokens": {"added_tokens": [token, token]}}
        for name, new in changes.items():
            with self.subTest(name):
                self.fresh_model()
                self.change_json("tokenizer.json", lambda tokenizer, new=new: tokenizer.update(new))
                self.expect_told(1, "oscar-calibrate", self.model, self.text, self.out, "--dry-run",
                                 pipes=name == "model")
        with self.subTest("merges"):
            self.fresh_model()
            self.change_json("tokenizer.json", lambda t: t["model"]["merges"].append([HOSTILE, "a"]))
            self.expect_told(1, "oscar-calibrate", self.model, self.text, self.out, "--dry-run",
                             pipes=False)

    def test_of_texts_and_their_names(self):
        def calibrate(corpus, code, *options):
            self.expect_told(code, "oscar-calibrate", self.model, corpus, self.out, "--device", "cpu",
                             "--dry-run", *options, pipes=False)

        name = ESCAPES.replace("/", "") + ".txt"
        with self.subTest("a file"):
            calibrate(shutil.copy(self.text, self.folder / name), 0, "--sequence-length", "256")
        with self.subTest("a file that is missing"):
            calibrate(self.folder / (name + "x" * 2000), 1)
        with self.subTest("a folder"):
            folder = self.folder / "texts"
            folder.mkdir()
            (folder / name).write_bytes(b"\xff\xfe no text")
            calibrate(folder, 1)
        lines = self.folder / "lines.jsonl"
        with self.subTest("keys"):
            lines.write_text(json.dumps({HOSTILE: 1, "text": 1}) + "\n")
            code, said = self.on_terminal("oscar-calibrate", self.model, lines, self.out, "--dry-run")
            self.assertEqual(code, 1)
            self.check(said)
        with self.subTest("role"):
            (self.model / "chat_template.jinja").write_text("{{ raise_exception('no role ' + messages[0].role) }}")
            lines.write_text(json.dumps({"messages": [{"role": HOSTILE, "content": "a"}]}) + "\n")
            calibrate(lines, 1)
        with self.subTest("template"):
            lines.write_text(json.dumps({"messages": [{"role": "assistant", "content": "a"}]}) + "\n")
            (self.model / "chat_template.jinja").write_text("{% " + HOSTILE + " %}")
            code, said = self.on_terminal("oscar-calibrate", self.model, lines, self.out, "--dry-run")
            self.assertEqual(code, 1)
            self.check(said)

    def bundle_of(self, change, name="hostile.h5"):
        path = make_file(self.folder / name)
        with h5py.File(path, "r+") as file:
            change(file)
            seal(file)
        return path

    def test_of_attributes_of_a_bundle(self):
        plain, told = make_file(self.folder / "plain.h5"), 0
        with h5py.File(plain) as file:
            places = [(group, name) for group in ("/", "model", "corpus", "quantizer", "layers/000")
                      for name, value in file[group].attrs.items()
                      if isinstance(value, bytes) and name not in ("content_sha256", "required_features")]
        self.assertGreater(len(places), 20)
        for group, name in places:
            with self.subTest(attribute=f"{group}/{name}"):
                path = self.bundle_of(lambda file, group=group, name=name: file[group].attrs.create(
                    name, np.bytes_(HOSTILE.encode())))
                for command in (["inspect", path], ["verify", path], ["diff", plain, path]):
                    code, said = self.on_terminal("oscar-bundle", *command)
                    self.assertIn(code, (0, 1), said)
                    self.check(said)
                    told += "owned" in said
        self.assertGreater(told, len(places))

    def hostile_everywhere(self, file):
        for group, name in (("model", "name"), ("model", "architecture"), ("corpus", "template"),
                            ("corpus", "bos_eos_policy"), ("/", "tool_version"), ("/", "preset"),
                            ("/", "created_utc")):
            file[group].attrs[name] = np.bytes_(HOSTILE.encode())
        source = json.loads(file["corpus"].attrs["sources"])[0] | {"name": HOSTILE}
        file["corpus"].attrs["sources"] = np.bytes_(json.dumps([source]).encode())

    def test_of_names_in_a_bundle(self):
        path = self.bundle_of(self.hostile_everywhere)
        for command in (["inspect", path], ["inspect", path, "--json", "-"], ["card", path, "-o", "-"],
                        ["plan", path]):
            with self.subTest(command[0]):
                whole = command[0] == "card" or "--json" in command
                self.expect_told(0, "oscar-bundle", *command, pipes=not whole, whole=whole)
        other = make_file(self.folder / "other.h5", seed=1)
        for command in (["merge", path, other, "-o", self.out], ["coverage", path, other]):
            with self.subTest(command[0]):
                code, said = self.on_terminal("oscar-bundle", *command)
                self.assertIn(code, (0, 1))
                self.check(said)
        with self.subTest("a bundle of another model"):
            self.expect_told(1, "oscar-eval", self.model, "--bundle", path, "--corpus", self.text)
        data = json.loads(self.through_pipes("oscar-bundle", "inspect", path, "--json", "-")[1])
        self.assertEqual(data["model"]["name"], HOSTILE)  # as it is, for programs

    def test_of_files_of_other_tools(self):
        arrays = self.folder / "arrays.npz"
        np.savez(arrays, **{ESCAPES.replace("/", "") + "x" * 2000: np.zeros(3)})
        report = self.folder / "report.json"
        report.write_text(json.dumps({"schema": HOSTILE, HOSTILE: 1}))
        for name, command in {"npz": ["import", arrays, "--model", self.model, "-o", self.out],
                              "report": ["report", report, "-o", "-"]}.items():
            with self.subTest(name):
                code, said = self.on_terminal("oscar-bundle", *command)
                self.assertEqual(code, 1, said)
                self.check(said)

    def test_of_a_report(self):
        report = self.folder / "report.json"
        self.run_ok("oscar-eval", self.model, "--corpus", self.text, "--device", "cpu", "--sequence-length",
                    256, "--max-tokens", 512, "--sink", 4, "--recent", 16, "--compare", "identity",
                    "--separators", "off", "--json", report)
        data = json.loads(report.read_text())
        data["methods"] = {HOSTILE if name == "identity" else name: value
                           for name, value in data["methods"].items()}
        data["model"]["name"] = HOSTILE
        report.write_text(json.dumps(data))
        self.expect_told(0, "oscar-bundle", "report", report, "-o", "-", pipes=False, whole=True)


if __name__ == "__main__":
    unittest.main()
