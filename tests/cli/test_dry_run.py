"""What oscar-calibrate --dry-run says of time, memory and disk, held to the run itself."""
import json
import os
import signal
import subprocess
import time
import unittest

import numpy as np

from support import checkpoints, stops
from support.programs import BIN, ENVIRONMENT, SOURCE, ProgramTest

MIB = 1 << 20
# A host that other work shares can be this much slower for a while, in the estimate or in the run.
TIME_FACTOR = 3
# Seconds that are not of one kind of work: opening, reading, writing.
TIME_SLACK = 2


class Costs(ProgramTest):
    def dry_and_real(self, model, corpus, *options):
        """The estimate, and what the run took: seconds, bytes of OUT, of its checkpoint and of memory."""
        out, report = self.folder / "out.h5", self.folder / "report.json"
        arguments = ["--device", "cpu", model, corpus, out, "--quiet", *options, "--json", report]
        self.run_ok("oscar-calibrate", *arguments, "--dry-run")
        estimate = json.loads(report.read_text())
        self.real_arguments = [str(word) for word in arguments if word != "--force"]
        process = subprocess.Popen([BIN / "oscar-calibrate", *map(str, arguments)], env=ENVIRONMENT)
        checkpoint_bytes = 0
        while True:
            try:
                checkpoint_bytes = max(checkpoint_bytes,
                                       os.path.getsize(f"{out}.checkpoint"))
            except FileNotFoundError:
                pass
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            time.sleep(.002)
        process.returncode = os.waitstatus_to_exitcode(status)
        self.assertEqual(process.returncode, 0)
        real = json.loads(report.read_text())
        real |= {"host_bytes": usage.ru_maxrss * 1024, "bundle_bytes": out.stat().st_size,
                 "checkpoint_bytes": checkpoint_bytes}
        for name in ("host_bytes", "bundle_bytes", "checkpoint_bytes"):
            print(f"{self.id()}: {name} {estimate[name] / MIB:.1f} MiB estimated, "
                  f"{real[name] / MIB:.1f} found")
        for name in ("collect", "convergence", "fit", "search"):
            said = estimate["seconds" if name == "collect" else f"{name}_seconds"]
            print(f"{self.id()}: {name} {said:.2f} s estimated, {real[f'{name}_seconds']:.2f} found")
        return estimate, real

    def expect_bytes(self, estimate, real):
        # "At most": matrices are compressed, by an eighth where they are dense.
        self.assertLessEqual(real["bundle_bytes"], estimate["bundle_bytes"] * 1.02)
        self.assertGreaterEqual(real["bundle_bytes"], estimate["bundle_bytes"] * .8)
        self.assertLessEqual(real["checkpoint_bytes"], estimate["checkpoint_bytes"] * 1.02)
        if real["checkpoint_bytes"]:  # short runs keep none
            self.assertGreaterEqual(real["checkpoint_bytes"], estimate["checkpoint_bytes"] * .8)

    def expect_memory(self, estimate, real):
        self.assertLessEqual(real["host_bytes"], estimate["host_bytes"])
        # A quarter of a GiB of either is libtorch itself, which says nothing of the work: what a run of
        # next to no tensors takes is not counted, in the estimate and in what was found.
        empty_estimate, empty_found = self.of_an_empty_run()
        planned = estimate["host_bytes"] - empty_estimate
        # Peaks differ from run to run, by when threads ask and what malloc gives back (360 to 412 MiB of 36
        # runs with a search): a low one is measured again, three times at most.
        highest = real["host_bytes"] - empty_found
        for _ in range(3):
            if planned > 1.1 * highest:
                highest = max(highest, self.peak_again() - empty_found)
        print(f"{self.id()}: beside an empty run {planned / MIB:.1f} MiB estimated, "
              f"{highest / MIB:.1f} found")
        self.assertLessEqual(planned, 1.1 * highest)

    def of_an_empty_run(self):
        """Bytes of memory that a run of next to no tensors is planned with, and takes."""
        model = checkpoints.write_checkpoint(self.folder / "empty", {})
        text = self.folder / "empty.txt"
        text.write_text("".join(checkpoints.sample_text(40)))
        arguments = [*map(str, ("--device", "cpu", model, text, self.folder / "empty.h5",
                                "--statistics-only", "--quiet", "--force"))]
        report = self.folder / "empty.json"
        self.run_ok("oscar-calibrate", *arguments, "--dry-run", "--json", report)
        return json.loads(report.read_text())["host_bytes"], self.peak_of(arguments)

    def peak_again(self):
        """Peak memory of the last real run, in bytes, in another one."""
        return self.peak_of([*self.real_arguments, "--force"])

    def peak_of(self, arguments):
        process = subprocess.Popen([BIN / "oscar-calibrate", *arguments], env=ENVIRONMENT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        self.assertEqual(process.returncode, 0)
        return usage.ru_maxrss * 1024

    def expect_time(self, estimate, real, name):
        said = estimate["seconds" if name == "collect" else f"{name}_seconds"]
        found = real[f"{name}_seconds"]
        self.assertLessEqual(said, TIME_FACTOR * found + TIME_SLACK, name)
        self.assertLessEqual(found, TIME_FACTOR * said + TIME_SLACK, name)

    def random_model(self, **config):
        model = checkpoints.write_checkpoint(self.folder / "model", config)
        text = self.folder / "text.txt"
        text.write_text("".join(checkpoints.sample_text(400)))
        return model, text

    def test_a_search_on_the_embedded_model(self):
        model = SOURCE / "datasets" / "tiny-gqa"
        estimate, real = self.dry_and_real(model, model / "calibration.jsonl", "--sequence-length", 512,
                                           "--max-tokens", 4096)
        self.expect_bytes(estimate, real)
        self.expect_memory(estimate, real)
        for name in ("collect", "convergence", "search"):
            self.expect_time(estimate, real, name)

    def test_a_limit_that_is_too_low_for_the_search_is_told_before_the_work(self):
        model = SOURCE / "datasets" / "tiny-gqa"
        arguments = [model, model / "calibration.jsonl", self.folder / "out.h5", "--device", "cpu",
                     "--max-tokens", 32768, "--host-memory", "564M"]
        for dry in ([], ["--dry-run"]):
            self.refuse("oscar-calibrate", arguments + dry, "the search of one layer", "--search off")
        self.run_ok("oscar-calibrate", *arguments, "--search", "off", "--dry-run")

    def test_the_checkpoint_of_a_stop_between_two_layers(self):
        model, text = self.random_model(hidden_size=512, intermediate_size=4096, num_hidden_layers=6)
        out, report = self.folder / "out.h5", self.folder / "report.json"
        command = [BIN / "oscar-calibrate", model, text, out, "--device", "cpu", "--sequence-length", 512,
                   "--max-tokens", 8192, "--search", "off", "--json", report]
        self.run_ok(command[0].name, *command[1:], "--dry-run")
        estimate = json.loads(report.read_text())
        run = stops.Watched(command)
        run.wait_for(b"collecting")  # all the text passes the first layer, then the second
        run.process.send_signal(signal.SIGTERM)
        self.assertEqual(run.finish(), 130)
        found = os.path.getsize(f"{out}.checkpoint")
        self.assertGreater(found, 10 * estimate["checkpoint_bytes"], "hidden states count here")
        self.assertLessEqual(found, estimate["stop_checkpoint_bytes"] * 1.02)
        self.assertGreaterEqual(found, estimate["stop_checkpoint_bytes"] * .8)

    def test_sums_that_outweigh_the_model(self):
        estimate, real = self.dry_and_real(
            *self.random_model(num_attention_heads=16, num_key_value_heads=16, head_dim=128,
                               num_hidden_layers=4),
            "--sequence-length", 1024, "--max-tokens", 8192, "--search", "off", "--checkpoint-every", 1)
        self.assertGreater(real["convergence_seconds"], 0)  # else nothing is compared
        self.expect_bytes(estimate, real)
        self.expect_memory(estimate, real)
        for name in ("collect", "convergence", "fit"):
            self.expect_time(estimate, real, name)

    def test_activations_that_outweigh_the_model(self):
        estimate, real = self.dry_and_real(
            *self.random_model(hidden_size=512, intermediate_size=4096, num_attention_heads=16,
                               max_position_embeddings=8192),
            "--sequence-length", 4096, "--max-tokens", 8192, "--statistics-only")
        self.expect_bytes(estimate, real)
        self.expect_memory(estimate, real)
        self.expect_time(estimate, real, "collect")

    def test_layers_that_cost_more_than_the_first(self):
        """As GLM has them: a dense layer, then experts, which are nearly all of the run."""
        config = checkpoints.QWEN3_MINI | dict(
            architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", hidden_size=256,
            intermediate_size=32, num_hidden_layers=4, mlp_only_layers=[0], num_experts=8,
            num_experts_per_tok=8, moe_intermediate_size=2048, norm_topk_prob=True)
        tensors = checkpoints.qwen3_tensors(config)
        rng = np.random.default_rng(1)
        for i in range(1, 4):
            mlp = f"model.layers.{i}.mlp."
            for name in ("gate_proj", "up_proj", "down_proj"):
                del tensors[f"{mlp}{name}.weight"]
            tensors[f"{mlp}gate.weight"] = rng.standard_normal((8, 256), np.float32)
            for name, shape in (("gate_proj", (2048, 256)), ("up_proj", (2048, 256)),
                                ("down_proj", (256, 2048))):
                for e in range(8):
                    tensors[f"{mlp}experts.{e}.{name}.weight"] = (
                        rng.standard_normal(shape, np.float32) / 16)
        model = checkpoints.write_checkpoint(self.folder / "model", config, tensors)
        text = self.folder / "text.txt"
        text.write_text("".join(checkpoints.sample_text(400)))
        estimate, real = self.dry_and_real(model, text, "--sequence-length", 1024, "--max-tokens", 8192,
                                           "--statistics-only")
        self.expect_memory(estimate, real)
        self.assertGreater(real["collect_seconds"], 2 * TIME_SLACK)  # else nothing is compared
        self.expect_time(estimate, real, "collect")

    def test_limits_that_keep_weights_in_memory_or_make_them_stream_are_kept(self):
        model = self.random_model(num_hidden_layers=12, hidden_size=256, intermediate_size=2048)
        for limit, streams in ((484, False), (434, True)):
            with self.subTest(limit):
                estimate, real = self.dry_and_real(
                    *model, "--sequence-length", 128, "--max-tokens", 8192, "--search", "off", "--force",
                    "--host-memory", f"{limit}M")
                self.assertEqual(estimate["weights_resident"], not streams)
                self.expect_memory(estimate, real)
                self.assertLessEqual(real["host_bytes"], limit * MIB)


if __name__ == "__main__":
    unittest.main()
