#!/usr/bin/env python3
"""What shows that an engine runs over INT2: one log line, /metrics, and the self-check at start-up."""
import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
import types
import unittest
import urllib.request
from unittest import mock

import vllm_case as case
import torch
from vllm_case import needs_vllm, vllm

OPTIONS = {"max_model_len": 2400, "kv_cache_memory_bytes": 1 << 23, "disable_log_stats": False}


def short_sha256():
    """As log and metrics have the bundle's."""
    from oscar_int2 import load

    return load(case.BUNDLE).content_sha256[:16]


def other_layers(file):
    """Each layer has the transforms of the next one, and none has samples, by which a start would be refused before."""
    case.without_samples(file)
    layers = sorted(file["layers"])
    for layer in layers:
        file.move(f"layers/{layer}", f"layers/was-{layer}")
    for layer, following in zip(layers, layers[1:] + layers[:1]):
        file.move(f"layers/was-{following}", f"layers/{layer}")
        file[f"layers/{layer}"].attrs["layer_id"] = int(layer)


def metrics(name):
    """{labels but that of the model: value} of a metric in this process's registry."""
    from prometheus_client import REGISTRY

    return {tuple(sorted(sample.labels.items() - {("model_name", str(case.MODEL))})): sample.value
            for family in REGISTRY.collect() for sample in family.samples if sample.name == name}


def checked_engine(**options):
    with mock.patch.dict(os.environ, VLLM_OSCAR_SELF_CHECK="1"):
        return case.Engine(**OPTIONS, **options)


@needs_vllm
class Proof(case.EngineTest):
    @classmethod
    def setUpClass(cls):
        cls.engine = checked_engine(enable_prompt_embeds=True)

    def test_the_log_says_so_at_the_level_of_warnings(self):
        facts = (f"bundle=tiny-gqa.h5 model=tiny-gqa sha256={short_sha256()} serving_sha256=[0-9a-f]{{16}} "
                 "bits=2 sink_tokens=64 recent_tokens=256")
        self.engine.log.find(f"^OSCAR INT2 is on: 8 layers hold 2-bit rows, {facts}$")
        self.assertEqual({level for level, text in self.engine.log.levels if "INT2 is on" in text
                          or "self-check" in text}, {"WARNING"})

    def test_the_self_check_quotes_and_leaves_nothing_behind(self):
        found = self.engine.log.find(r"self-check passed: 48 quoted tokens: mean log probability (\S+) over "
                                     r"the 2-bit cache, (\S+) over BF16, (\S+) nat a token apart")
        served, exact, apart = map(float, found.groups())
        self.assertGreater(min(served, exact), -2, "a model that quotes")
        self.assertTrue(0 < apart < case.DRIFT, apart)
        self.engine.settle()
        manager = self.engine.scheduler.kv_cache_manager
        self.assertEqual(manager.usage, 0)
        self.assertTrue(manager.reset_prefix_cache(), "no block is held")
        self.assertEqual(self.engine.builder.slots.of, {})
        self.assertEqual(self.engine.scheduler.max_num_scheduled_tokens,
                         self.engine.scheduler.scheduler_config.max_num_batched_tokens)

    def test_log_probabilities_of_a_prompt_are_said_to_be_bf16s(self):
        said = "OSCAR INT2: log probabilities of a prompt .* are BF16's"
        self.assertFalse([text for text in self.engine.log.texts if "log probabilities of a prompt" in text],
                         "the self-check is no client")
        for _ in range(2):
            self.engine.prompt_log_probabilities(self.engine.prompt(0, 40))
        self.engine.log.find(said)
        self.assertEqual(len([text for text in self.engine.log.texts if "log probabilities of a prompt" in text]), 1)

    def test_what_shows_a_prompts_own_rows_is_known_by_its_parameters(self):
        from oscar_int2.vllm.hooks import scores_a_prompt

        for parameters, scores in (({"max_tokens": 1, "logprobs": 4}, True), ({"prompt_logprobs": 0}, True),
                                   ({"max_tokens": 1}, False), ({"max_tokens": 2, "logprobs": 4}, False)):
            self.assertIs(scores_a_prompt(vllm.SamplingParams(**parameters)), scores)
        self.assertFalse(scores_a_prompt(None))  # of a pooling request

    def test_metrics_say_which_bundle_and_what_the_cache_holds(self):
        engine, finished = self.engine, {}
        [(labels, one)] = metrics("oscar_int2_info").items()
        self.assertEqual(one, 1)
        for pair in (("bundle", "tiny-gqa.h5"), ("sha256", short_sha256()), ("bits", "2"),
                     ("sink_tokens", "64"), ("recent_tokens", "256"), ("engine", "0")):
            self.assertIn(pair, labels)
        [(labels, _)] = metrics("vllm:cache_config_info").items()
        self.assertIn(("oscar_int2_bundle", f"tiny-gqa.h5 {short_sha256()}"), labels)

        def tokens():
            return [metrics("oscar_int2_tokens")[("engine", "0"), ("rows", rows)]
                    for rows in ("int2", "exact")]

        def written():
            return metrics("oscar_int2_tokens_written_total")[(("engine", "0"),)]

        self.assertEqual(tokens(), [0, 0])
        before = written()
        engine.add(engine.prompt(0, 600), 4)
        engine.add(engine.prompt(1, 100), 4)
        engine.step(finished)
        self.assertEqual(tokens(), [272, 700 - 272])
        engine.run()
        self.assertEqual(tokens(), [0, 0])
        self.assertEqual(written(), before + 272)
        self.assertEqual(metrics("oscar_int2_refused_requests_total"), {(("engine", "0"),): 0})
        engine.add(engine.prompt(0, 90), 4, embeddings=torch.full((90, 384), torch.inf).bfloat16())
        engine.run()
        self.assertEqual(metrics("oscar_int2_refused_requests_total"), {(("engine", "0"),): 1})

    def test_stored_tokens_are_counted_once_but_for_preempted_requests(self):
        from oscar_int2.recipe import CacheFormat
        from oscar_int2.vllm import metrics as counted

        scheduler, format = types.SimpleNamespace(requests={}), CacheFormat(0, 64, 256, 16)
        for name, computed, scheduled, drafts, preemptions, stored in (
                ("a", 600, 600, 0, 0, 272), ("a", 601, 1, 0, 0, 0), ("a", 612, 11, 8, 0, 0), ("a", 608, 4, 0, 0, 16),
                ("a", 700, 700, 0, 1, 368), ("behind 700 shared tokens", 1000, 300, 0, 0, 672 - 636)):
            request = scheduler.requests.setdefault(name, types.SimpleNamespace())
            request.num_computed_tokens, request.num_preemptions = computed, preemptions
            output = mock.Mock(num_scheduled_tokens={name: scheduled}, scheduled_spec_decode_tokens={name: [1] * drafts})
            scheduler.oscar_written_tokens = 0
            counted.count_written(scheduler, output, format)
            self.assertEqual(scheduler.oscar_written_tokens, stored, (name, computed))

    def test_metrics_count_hits_and_misses_of_kept_sinks(self):
        engine, prefixes = self.engine, self.engine.scheduler.oscar_prefixes
        prompt = engine.prompt(2, 400)

        def counted():
            return [metrics(f"oscar_int2_sink_{what}_total")[(("engine", "0"),)] for what in ("hits", "misses")]

        before = counted()
        for _ in range(2):
            engine.add(prompt, 2)
            engine.run()
        self.assertEqual(counted(), [before[0] + 1, before[1]])
        prefixes.free_places.append(prefixes.places.popitem()[1])  # as another prefix takes its place
        engine.add(prompt, 2)
        engine.run()
        self.assertEqual(counted(), [before[0] + 1, before[1] + 1])


@needs_vllm
class Server(unittest.TestCase):
    """vLLM's own server: its API, its engine and its worker are processes of their own."""

    @contextlib.contextmanager
    def running(self, **environment):
        """(base address, path of its log) once it answers."""
        with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
            free.bind(("127.0.0.1", 0))
            port, log = free.getsockname()[1], pathlib.Path(folder) / "log"
            free.close()
            command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", case.MODEL,
                       "--host", "127.0.0.1", "--port", port, "--dtype", "bfloat16", "--enforce-eager",
                       "--max-model-len", 1024, "--max-num-seqs", 3, "--kv-cache-memory-bytes", 1 << 22,
                       "--gpu-memory-utilization", 0.2]
            names = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
            del names["VLLM_ENABLE_V1_MULTIPROCESSING"]
            with open(log, "w") as out, subprocess.Popen([*map(str, command)], env=names, stdout=out,
                                                         stderr=out) as server:
                try:
                    self.wait(server, f"http://127.0.0.1:{port}/health", log)
                    yield f"http://127.0.0.1:{port}", log
                finally:
                    server.terminate()

    def wait(self, server, address, log):
        end = time.monotonic() + 900
        while time.monotonic() < end:
            self.assertIsNone(server.poll(), "".join(
                line for line in log.open() if "Error" in line or "OSCAR" in line)[-3000:])
            with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=5):
                return
            time.sleep(0.5)
        self.fail(f"the server did not answer: {log.read_text()[-3000:]}")

    def test_a_server_shows_it_in_its_log_and_in_its_metrics(self):
        with self.running(VLLM_LOGGING_LEVEL="WARNING", VLLM_OSCAR_SELF_CHECK="1") as (address, log):
            text = log.read_text()
            for line in ("OSCAR INT2 is on: 8 layers hold 2-bit rows, bundle=tiny-gqa.h5",
                         "OSCAR INT2: self-check passed: 48 quoted tokens"):
                self.assertIn(line, text)
            self.assertNotRegex(text, r"INFO \d\d-\d\d ")  # vLLM's own
            body = {"model": str(case.MODEL), "prompt": [9, 8, 7] * 200, "max_tokens": 120, "stream": True,
                    "ignore_eos": True}
            request = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode(),
                                             {"Content-Type": "application/json"})
            with urllib.request.urlopen(request) as answer:
                answer.readline()
                held = self.metrics(address)
                answer.read()
            info = next(name for name in held if name.startswith("oscar_int2_info{"))
            for label in ('bundle="tiny-gqa.h5"', f'sha256="{short_sha256()}"', 'bits="2"', 'engine="0"'):
                self.assertIn(label, info)
            self.assertTrue(any(f'oscar_int2_bundle="tiny-gqa.h5 {short_sha256()}"' in name
                                for name in held if name.startswith("vllm:cache_config_info{")))
            self.assertGreaterEqual(self.tokens(held, "int2"), 272)
            self.assertGreaterEqual(self.tokens(held, "exact"), 320)
            self.assertEqual(self.tokens(self.metrics(address), "int2"), 0)

    def metrics(self, address):
        with urllib.request.urlopen(f"{address}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return dict(line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))

    def tokens(self, found, rows):
        return float(next(value for name, value in found.items()
                          if name.startswith("oscar_int2_tokens{") and f'rows="{rows}"' in name))


@needs_vllm
class Failures(unittest.TestCase):
    def test_the_transforms_of_other_layers_stop_the_start(self):
        from oscar_int2 import SelfCheckError

        with case.edited_bundle(other_layers) as path, case.bundle_variable(path), \
                self.assertRaisesRegex(SelfCheckError, "the self-check failed with .*bundle.h5"):
            checked_engine()

    def test_a_self_check_of_nothing_is_an_error(self):
        from oscar_int2 import BundleError
        from vllm.engine.arg_utils import EngineArgs

        for bundle, value, said in ((None, "1", "VLLM_OSCAR_BUNDLE is not set"),
                                    (case.BUNDLE, "yes", "VLLM_OSCAR_SELF_CHECK is 'yes'")):
            with case.bundle_variable(bundle), mock.patch.dict(os.environ, VLLM_OSCAR_SELF_CHECK=value), \
                    self.assertRaisesRegex(BundleError, said):
                EngineArgs(str(case.MODEL), **case.OPTIONS).create_engine_config()

    def test_an_engine_that_is_too_small_for_it_is_refused(self):
        from oscar_int2 import UnsupportedError
        from oscar_int2.recipe import CacheFormat
        from oscar_int2.vllm import self_check

        scheduler = mock.Mock(max_num_scheduled_tokens=600)
        config = mock.Mock()
        config.model_config.max_model_len, config.model_config.skip_tokenizer_init = 4096, True
        config.model_config.get_vocab_size = lambda: 8192
        with mock.patch.object(self_check.settings, "cache_format", lambda config: CacheFormat(0, 64, 256, 16)), \
                self.assertRaisesRegex(UnsupportedError, "VLLM_OSCAR_SELF_CHECK=1 needs steps of about 800 "
                                       "tokens, and this engine takes 600"):
            self_check._probe(config, scheduler)


if __name__ == "__main__":
    unittest.main(verbosity=2)
