"""Outputs that are no regular files, that stand already or that two runs write; inputs that change
while they are read."""
import collections
import contextlib
import fcntl
import hashlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import time
import unittest

import h5py
import numpy as np

from support import checkpoints, faults, stops
from support.bundle_case import make_file
from support.programs import BIN, ENVIRONMENT, ProgramTest, run


# A program as process 1 of a PID namespace, as containers have them: as root, or as a user.
CONTAINERS = [["unshare", *options, "--pid", "--fork", "--kill-child"]
              for options in ([], ["--user", "--map-root-user"])]


def container():
    """That of CONTAINERS which this machine permits, or None."""
    for prefix in CONTAINERS:
        with contextlib.suppress(FileNotFoundError):
            asked = subprocess.run([*prefix, "sh", "-c", "echo $$"], capture_output=True, text=True,
                                   check=False)
            if asked.stdout == "1\n":
                return prefix
    return None


class OutputsAndInputs(ProgramTest):
    prefix = []  # what starts a program

    def setUp(self):
        super().setUp()
        self.out, self.json = self.folder / "out.h5", self.folder / "out.json"

    def make_model(self, **config):
        self.model = checkpoints.write_checkpoint(self.folder / "model", config)
        self.text = self.folder / "text.txt"
        self.text.write_text("".join(checkpoints.sample_text(400)))
        self.weights = self.model / "model.safetensors"

    def calibrate(self, *options):
        return ["oscar-calibrate", self.model, self.text, self.out, "--max-tokens", 3072,
                "--sequence-length", 256, "--sink", 4, "--recent", 16, "--device", "cpu", "--search", "off",
                *options]

    def eval(self, *options, tokens=512, method="identity"):
        return ["oscar-eval", self.model, "--corpus", self.text, "--max-tokens", tokens, "--sequence-length",
                256, "--sink", 4, "--recent", 16, "--device", "cpu", "--compare", method,
                "--separators", "off", *options]

    def start(self, program, *arguments, **environment):
        process = subprocess.Popen([*self.prefix, *map(str, (BIN / program, *arguments))],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                   env={**ENVIRONMENT, **environment})
        self.addCleanup(process.kill)
        return process

    def started_and_waiting(self, *options, **environment):
        """A calibration that has read model and text, and waits until its tokens are read."""
        fifo = self.folder / "fifo"
        if not fifo.exists():
            os.mkfifo(fifo)
        tokens = open(os.open(fifo, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0)
        fcntl.fcntl(tokens, fcntl.F_SETPIPE_SZ, 4096)  # a third of them
        process = self.start(*self.calibrate("--tokens-out", fifo, *options), **environment)
        self.assertTrue(select.select([tokens], [], [], 120)[0])
        os.set_blocking(tokens.fileno(), True)
        return process, tokens

    def names(self):
        return {path.name for path in self.folder.iterdir()}

    def test_links_stay_and_what_they_lead_to_is_replaced(self):
        bundle = make_file(self.folder / "a.h5")
        (self.folder / "sub").mkdir()
        self.out.symlink_to("sub/b.h5")
        for force in ([], ["--force"]):
            self.run_ok("oscar-bundle", "strip", bundle, self.out, *force)
            self.assertTrue(self.out.is_symlink())
            self.run_ok("oscar-bundle", "verify", self.folder / "sub" / "b.h5")
        self.refuse("oscar-bundle", ["strip", bundle, self.out], "--force", "exists")

    def test_links_to_what_is_not_there_yet_make_no_two_outputs_one(self):
        self.make_model()
        self.json.symlink_to("out.h5")
        program, *arguments = self.calibrate("--json", self.json)
        self.refuse(program, arguments, "two outputs can't be one file", code=2)
        page = self.folder / "page.html"
        for link in (self.out, page):
            link.symlink_to("both.txt")
        program, *arguments = self.eval("--json", self.out, "--html", page, "--force")
        self.refuse(program, arguments, "two outputs can't be one file", code=2)

    def test_no_checkpoint_is_kept_beside_a_stream(self):
        self.make_model()
        os.mkfifo(self.folder / "fifo")
        stdout = self.folder / "stdout"  # a copy of /dev/stdout, beside which nothing here may be
        stdout.symlink_to("/proc/self/fd/1")
        for stream in (stdout, self.folder / "fifo"):
            program, *arguments = self.eval("--json", stream, "--resume")
            self.refuse(program, arguments, "beside which a checkpoint could be", code=2)

    def test_one_signal_ends_a_run_whose_messages_nobody_reads(self):
        self.make_model()
        program, *arguments = self.calibrate()
        reading, writing = os.pipe()
        self.addCleanup(os.close, reading)
        os.set_blocking(writing, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writing, b"x")
        os.set_blocking(writing, True)
        process = subprocess.Popen([str(word) for word in (BIN / program, *arguments)],
                                   env=ENVIRONMENT, stderr=writing, stdout=writing)
        self.addCleanup(process.kill)
        os.close(writing)
        stops.wait_until_held(process)  # its first message waits for a reader
        process.send_signal(signal.SIGTERM)
        asked = time.monotonic()
        self.assertEqual(process.wait(timeout=60), 130)
        self.assertLess(time.monotonic() - asked, 9)  # five seconds, on a busy machine

    def test_a_bundle_goes_through_a_fifo(self):
        bundle = make_file(self.folder / "a.h5")
        os.mkfifo(self.out)
        process = self.start("oscar-bundle", "strip", bundle, self.out)
        through = self.out.read_bytes()
        self.assertEqual(process.wait(timeout=60), 0)
        self.assertTrue(self.out.is_fifo())
        self.run_ok("oscar-bundle", "strip", bundle, self.folder / "b.h5")
        self.assertEqual(through, (self.folder / "b.h5").read_bytes())

    def test_one_signal_ends_a_run_that_waits_for_a_reader(self):
        self.make_model()
        os.mkfifo(self.folder / "fifo")
        process = self.start(*self.calibrate("--tokens-out", self.folder / "fifo"))
        stops.wait_until_held(process)
        process.send_signal(signal.SIGINT)
        asked = time.monotonic()
        process.wait(timeout=30)
        self.assertLess(time.monotonic() - asked, 9)  # five seconds, on a busy machine
        self.assertNotEqual(process.returncode, 0)
        self.assertEqual(self.names(), {"model", "text.txt", "fifo"})

    def test_reports_replace_files_only_when_asked_and_go_to_standard_output(self):
        self.make_model()
        page = self.folder / "page.html"
        stdout = self.folder / "stdout"  # a copy of /dev/stdout, which nothing here may replace
        stdout.symlink_to("/proc/self/fd/1")
        self.run_ok(*self.eval("--json", self.json))
        expected = self.json.read_text()
        self.refuse(*self.eval("--json", self.json)[:1], self.eval("--json", self.json)[1:],
                    "exists", "--force")
        self.assertEqual(self.run_ok(*self.eval("--json", "-")).stdout, expected)
        self.assertEqual(self.run_ok(*self.eval("--json", stdout, "--quiet")).stdout, expected)
        self.assertTrue(stdout.is_symlink())
        self.run_ok("oscar-bundle", "report", self.json, "-o", page)
        self.refuse("oscar-bundle", ["report", self.json, "-o", page], "exists", "--force")
        self.run_ok("oscar-bundle", "report", self.json, "-o", page, "--force")
        self.assertEqual(self.run_ok("oscar-bundle", "report", self.json, "-o", "-").stdout,
                         page.read_text())
        self.assertEqual(self.names(), {"model", "text.txt", "stdout", "out.json", "page.html"})

    def test_what_oscar_bundle_shows_is_written_as_json_where_it_is_asked_for(self):
        bundle = make_file(self.folder / "a.h5")
        for command in (["inspect", bundle], ["verify", bundle], ["plan", bundle], ["backends"]):
            with self.subTest(command[0]):
                shown = self.run_ok("oscar-bundle", *command).stdout
                self.assertEqual(self.run_ok("oscar-bundle", *command, "--json", self.json).stdout, shown)
                self.refuse("oscar-bundle", [*command, "--json", self.json], "exists", "--force")
                printed = self.run_ok("oscar-bundle", *command, "--json", "-").stdout
                self.run_ok("oscar-bundle", *command, "--json", self.json, "--force")
                self.assertEqual(self.json.read_text(), printed)
                json.loads(printed)
                self.json.unlink()
        self.refuse("oscar-bundle", ["inspect", bundle, "--json", bundle, "--force"],
                    "an output would overwrite an input", code=2)

    def test_a_second_run_of_one_output_is_refused_and_the_first_one_ends_well(self):
        self.make_model()
        process, tokens = self.started_and_waiting("--force")
        result = run(*self.calibrate("--force"))
        self.assertEqual(result.returncode, 1)
        self.assertIn("another run is writing", result.stderr)
        with tokens:
            tokens.read()
        self.assertEqual(process.wait(timeout=120), 0, process.stderr.read())
        self.run_ok("oscar-bundle", "verify", self.out)
        self.assertEqual(self.names(), {"model", "text.txt", "fifo", "out.h5"})

    def two_at_once(self, first, second, apart):
        """Exit codes and messages of two runs, the second begun `apart` seconds after the first."""
        processes = [self.start(*first)]
        time.sleep(apart)
        processes.append(self.start(*second))
        said = [process.communicate(timeout=120)[1] for process in processes]
        return [process.returncode for process in processes], said

    def expect_one_winner(self, name, first, second, expected, seconds):
        """Rounds of two runs that write self.out, up to `seconds` apart; `expected`: the bytes that
        each of them leaves when it wins."""
        inputs, refused = self.names() - {"out.h5"}, collections.Counter()
        source = stops.random_source(self)
        for _ in range(stops.KILLS or 4):
            self.out.unlink(missing_ok=True)
            codes, said = self.two_at_once(first, second, source.uniform(0, seconds))
            self.assertEqual(sorted(codes), [0, 1], said)
            reason = re.search("another run is writing|made while this run was under way|"
                               "exists already\\s", said[codes.index(1)])
            self.assertTrue(reason, said)
            refused[reason[0].strip()] += 1
            self.assertEqual(self.out.read_bytes(), expected[codes.index(0)])
            self.assertEqual(self.names(), inputs | {"out.h5"})
        print(f"{self.id()}: {name}: one of two won, the other said {dict(refused)}")

    def test_of_two_calibrations_at_once_one_wins(self):
        self.make_model()
        # With a search: a second run waits for a second or two before it says that there is one.
        command = [word for word in self.calibrate() if word not in ("--search", "off")]
        began = time.monotonic()
        self.run_ok(*command)
        seconds = time.monotonic() - began
        self.expect_one_winner("calibrate", command, command, [self.out.read_bytes()] * 2, seconds)

    def two_strips(self):
        """Two commands that write self.out, and what each writes."""
        commands, expected = [], []
        for seed in range(2):
            bundle = make_file(self.folder / f"{seed}.h5", seed=seed)
            commands.append(["oscar-bundle", "strip", bundle, self.out])
            self.run_ok(*commands[-1])
            expected.append(self.out.read_bytes())
            self.out.unlink()
        return *commands, expected

    def test_of_two_bundle_outputs_at_once_one_wins(self):
        self.expect_one_winner("strip", *self.two_strips(), .08)

    def test_of_two_containers_with_one_process_number_and_one_output_one_wins(self):
        prefix = container()
        if prefix is None:
            self.skipTest("unshare --pid is not permitted here")
        strips = self.two_strips()
        self.make_model()
        command = self.calibrate()
        began = time.monotonic()
        self.run_ok(*command)
        seconds, bundle = time.monotonic() - began, self.out.read_bytes()
        self.prefix = prefix
        self.expect_one_winner("strip in containers", *strips, 0)
        self.expect_one_winner("calibrate in containers", command, command, [bundle] * 2, seconds)

    def test_of_two_evaluations_at_once_one_writes_back(self):
        self.make_model()
        self.run_ok(*self.calibrate())
        plain = self.out.read_bytes()
        command = self.eval("--bundle", self.out, "--write-back", method="bundle")
        began = time.monotonic()
        self.run_ok(*command)
        seconds, once = time.monotonic() - began, self.out.read_bytes()
        self.run_ok(*command)
        expected, ends = (once, self.out.read_bytes()), collections.Counter()
        source, names = stops.random_source(self), self.names()
        for _ in range(stops.KILLS or 4):
            self.out.write_bytes(plain)
            codes, said = self.two_at_once(command, command, source.uniform(0, seconds))
            self.assertIn(0, codes, said)
            end = "one after the other"
            if 1 in codes:
                end = re.search("another run is writing|left as it is", said[codes.index(1)])
                self.assertTrue(end, said)
                end = end[0]
            ends[end] += 1
            self.assertIn(self.out.read_bytes(), expected[:1] if 1 in codes else expected)
            self.assertEqual(self.names(), names)
        print(f"{self.id()}: write-back: {dict(ends)}")

    def test_a_file_made_during_a_run_is_kept(self):
        self.make_model()
        process, tokens = self.started_and_waiting()
        self.out.write_text("precious")
        with tokens:
            tokens.read()
        self.assertEqual(process.wait(timeout=120), 1)
        self.assertIn("made while this run was under way", process.stderr.read())
        self.assertEqual(self.out.read_text(), "precious")

    def test_weights_that_change_during_a_run_give_an_error_and_no_bundle(self):
        self.make_model()
        whole = self.weights.read_bytes()

        def overwrite():
            with self.weights.open("r+b") as file:
                file.seek(-4, os.SEEK_END)
                file.write(b"\0\0\0\0")

        def replace():
            (self.folder / "other").write_bytes(whole)
            (self.folder / "other").rename(self.weights)

        for change, word in ((overwrite, "new content"), (replace, "another file"),
                             (lambda: os.truncate(self.weights, 4096), "cut short")):
            with self.subTest(word):
                process, tokens = self.started_and_waiting()
                change()
                with tokens:
                    tokens.read()
                self.assertEqual(process.wait(timeout=120), 1)
                said = process.stderr.read()
                self.assertIn(word, said)
                self.assertIn("model.safetensors", said)
                self.assertFalse(self.out.exists())
                self.weights.write_bytes(whole)
        self.run_ok(*self.calibrate())  # removes what a cut file made the run leave
        self.assertEqual(self.names(), {"model", "text.txt", "fifo", "out.h5"})

    def stopped_and_changed(self, command, word, change):
        """What `command` says and its exit code, where `change` happens once it has said `word`."""
        process = self.start(*command)
        for line in process.stderr:
            if line.startswith(word):
                break
        process.send_signal(signal.SIGSTOP)
        change()
        process.send_signal(signal.SIGCONT)
        said = process.communicate(timeout=120)[1]
        return process.returncode, said

    def test_weights_that_change_during_an_evaluation_give_an_error_and_no_report(self):
        self.make_model()
        code, said = self.stopped_and_changed(self.eval("--json", self.json, tokens=3072), "prepare",
                                              lambda: os.utime(self.weights))
        self.assertEqual(code, 1, said)
        self.assertIn("new content", said)
        self.assertIn("model.safetensors", said)
        self.assertEqual(self.names() - {"out.json.checkpoint"}, {"model", "text.txt"})

    def test_weights_that_change_while_they_are_folded_give_an_error_and_no_folder(self):
        self.make_model(hidden_size=256, intermediate_size=8192)  # so that writing takes a while
        self.run_ok(*self.calibrate())
        names = self.names()
        for _ in range(20):  # a run may end before it is stopped
            process = self.start("oscar-bundle", "fold", self.out, self.model, self.folder / "folded")
            while process.poll() is None and not list(self.folder.glob("folded.*/*.safetensors")):
                time.sleep(.001)
            process.send_signal(signal.SIGSTOP)
            if not (self.folder / "folded").exists():
                break
            process.kill()
            process.communicate()
            shutil.rmtree(self.folder / "folded")
        os.utime(self.weights)
        process.send_signal(signal.SIGCONT)
        said = process.communicate(timeout=120)[1]
        self.assertEqual(process.returncode, 1, said)
        self.assertIn("new content", said)
        self.assertIn("model.safetensors", said)
        self.assertEqual(self.names(), names)

    def corpora(self):
        """A corpus of each kind, and one with other content of the same size."""
        texts = ["".join(checkpoints.sample_text(100, seed)) for seed in range(2)]
        size = min(map(len, texts))
        for number, text in enumerate(texts):
            ids = np.frombuffer(text[:size].encode(), np.uint8).astype(np.int64)
            folder = self.folder / f"corpora{number}"
            folder.mkdir()
            (folder / "a.txt").write_text(text[:size])
            (folder / "a.jsonl").write_text(json.dumps({"text": text[:size - 20]}) + "\n")
            np.save(folder / "a.npy", ids)
            with h5py.File(folder / "a.h5", "w") as file:
                file["tokens"] = ids
        return {path: self.folder / "corpora1" / path.name
                for path in sorted((self.folder / "corpora0").iterdir())}

    def calibrate_while(self, how, corpus, other):
        """Collects from a copy of `corpus`, which other content replaces when it has been read."""
        self.out.unlink(missing_ok=True)
        copies = [shutil.copy(corpus, self.folder / corpus.name), shutil.copy(other, self.folder / "other")]
        changes = {"LD_PRELOAD": str(faults.SHIM), "OSCAR_CHANGE": ":".join((how, *map(str, copies)))}
        process = self.start("oscar-calibrate", self.model, copies[0], self.out, "--device", "cpu",
                             "--sequence-length", 256, "--max-tokens", 512, "--statistics-only",
                             **changes if how else {})
        said = process.communicate(timeout=120)[1]
        if how:
            self.assertEqual(copies[0].read_bytes(), other.read_bytes(), "the change did not happen")
        return process.returncode, said

    def test_a_corpus_that_is_replaced_once_it_has_been_read_changes_neither_hash_nor_tokens(self):
        self.make_model()
        for corpus, other in self.corpora().items():
            self.assertEqual(self.calibrate_while("", corpus, other)[0], 0)
            whole = self.out.read_bytes()
            with h5py.File(self.out) as file:
                self.assertEqual(json.loads(file["corpus"].attrs["sources"])[0]["sha256"],
                                 hashlib.sha256(corpus.read_bytes()).hexdigest())
            with self.subTest(corpus.name):
                code, said = self.calibrate_while("replace", corpus, other)
                if corpus.suffix == ".h5":  # which libhdf5 opens by a name
                    self.assertEqual(code, 1)
                    self.assertIn("another file under its name", said)
                    self.assertFalse(self.out.exists())
                    continue
                self.assertEqual(code, 0, said)
                self.assertEqual(self.out.read_bytes(), whole)

    def test_a_corpus_that_is_overwritten_between_reading_and_hashing_is_an_error(self):
        self.make_model()
        for corpus, other in self.corpora().items():
            with self.subTest(corpus.name):
                code, said = self.calibrate_while("overwrite", corpus, other)
                if corpus.suffix == ".h5":  # read by libhdf5, then hashed
                    self.assertEqual(code, 1, said)
                    self.assertIn("changed while it was in use", said)
                    self.assertFalse(self.out.exists())
                    continue
                self.assertEqual(code, 0, said)  # read once, into memory
                with h5py.File(self.out) as file:
                    self.assertEqual(json.loads(file["corpus"].attrs["sources"])[0]["sha256"],
                                     hashlib.sha256(corpus.read_bytes()).hexdigest())

    def test_a_report_is_not_written_back_over_a_bundle_that_was_replaced(self):
        self.make_model()
        self.run_ok(*self.calibrate())
        other = self.folder / "other.h5"
        self.run_ok("oscar-bundle", "strip", self.out, other)
        newer = other.read_bytes()
        # The bundle has been read when methods are prepared.
        code, said = self.stopped_and_changed(
            self.eval("--bundle", self.out, "--write-back", tokens=3072, method="bundle"), "prepare",
            lambda: other.rename(self.out))
        self.assertEqual(code, 1, said)
        self.assertIn("left as it is", said)
        self.assertEqual(self.out.read_bytes(), newer)

    def test_a_resumed_run_has_the_date_of_its_first_start(self):
        self.make_model()
        # Empty is as good as not set.
        process, tokens = self.started_and_waiting(SOURCE_DATE_EPOCH="")
        with tokens:
            tokens.read()
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
        checkpoint = self.folder / "out.h5.checkpoint"
        self.assertTrue(checkpoint.exists(), process.stderr.read())
        copy = shutil.copy(checkpoint, self.folder / "copy")
        written = []
        for _ in range(2):
            time.sleep(1.1)
            subprocess.run([str(word) for word in (BIN / self.calibrate()[0],
                            *self.calibrate("--resume", "--quiet")[1:])],
                           env=ENVIRONMENT | {"SOURCE_DATE_EPOCH": ""}, check=True)
            written.append(self.out.read_bytes())
            self.out.unlink()
            shutil.copy(copy, checkpoint)
        self.assertEqual(written[0], written[1])
        self.out.write_bytes(written[0])
        with h5py.File(self.out) as bundle, h5py.File(copy) as saved:
            self.assertEqual(bundle.attrs["created_utc"], saved.attrs["created_utc"])

    def test_links_out_of_a_model_are_not_folded(self):
        self.make_model()
        self.run_ok(*self.calibrate())
        key = self.folder / "key"
        key.write_text("secret")
        (self.model / "notes.txt").symlink_to(key)
        (self.model / "same.json").symlink_to("config.json")
        result = self.run_ok("oscar-bundle", "fold", self.out, self.model, self.folder / "folded")
        self.assertIn("not copied  notes.txt", result.stdout)
        self.assertFalse((self.folder / "folded" / "notes.txt").exists())
        self.assertEqual(json.loads((self.folder / "folded" / "same.json").read_text())["model_type"],
                         "qwen3")


if __name__ == "__main__":
    unittest.main()
