"""What the tests of the vLLM plugin share: its environment, one engine, its requests.
Imported first by a test, it starts the test again where vLLM is: in .venv-vllm, or in the virtual
environment that OSCAR_VLLM_VENV names."""
import collections
import contextlib
import functools
import json
import logging
import os
import pathlib
import re
import shutil
import sys
import tempfile
import unittest
from unittest import mock

SOURCE = pathlib.Path(os.environ["OSCAR_SOURCE"])
VENV = pathlib.Path(os.environ.get("OSCAR_VLLM_VENV", SOURCE / ".venv-vllm")).absolute() / "bin" / "python"
if VENV.exists() and pathlib.Path(sys.prefix) != VENV.parent.parent:
    os.execv(VENV, [str(VENV), *sys.argv])  # vLLM has needs of its own: scripts/setup_vllm.sh

import h5py
import numpy as np
import torch


# vLLM's model runner, 1 or 2. Without Triton, as on a CPU, the second one needs its interpreter.
RUNNER = int(os.environ.get("OSCAR_VLLM_RUNNER", "1"))
INTERPRETED = RUNNER == 2 and not torch.cuda.is_available()
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(RUNNER - 1)
try:
    if INTERPRETED:
        import second_runner

        second_runner.interpret()
    import vllm
except ImportError:
    vllm = None
needs_vllm = unittest.skipUnless(vllm, "there is no vLLM here: scripts/setup_vllm.sh installs one")

MODEL = SOURCE / "datasets" / "tiny-gqa"
BUNDLE = SOURCE / "rotation_zoo" / "tiny-gqa" / "tiny-gqa.h5"
# In one process, without torch.compile (a minute of C++ at every start), windows that nobody holds
# full of NaN. The telemetry of vLLM stays off.
ENVIRONMENT = {"VLLM_OSCAR_BUNDLE": str(BUNDLE), "OSCAR_INT2_POISON": "1",
               "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1",
               "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
POOL_BYTES = 73728 * 36  # 36 blocks of 8 layers x 2 heads x 4608 bytes; vLLM keeps one to itself
MAX_NUM_SEQS, MAX_MODEL_LEN = 3, 1024
# Steps are counted: one is begun when the last has ended, as on a CPU (but see overlapped.py).
OPTIONS = {"dtype": "bfloat16", "enforce_eager": True, "async_scheduling": False,
           "max_model_len": MAX_MODEL_LEN, "max_num_seqs": MAX_NUM_SEQS,
           "kv_cache_memory_bytes": POOL_BYTES, "seed": 0}
if torch.cuda.is_available():  # a share that others may leave free
    OPTIONS["gpu_memory_utilization"] = float(os.environ.get("OSCAR_VLLM_MEMORY", "0.5"))
# bf16 sums depend on how many rows a product has: vLLM's own BF16 cache moves log probabilities of
# this model by .042 between a batch and a single run, and tokens change where two are that close.
# A window of another request, or one of NaN, moves them by whole nats.
DRIFT, TIE = 0.25, 0.15


def install_plugin():
    """What pip would: the package on the path, and beside it what vLLM finds it by."""
    os.environ.update(ENVIRONMENT)
    sys.path.insert(0, os.environ.get("OSCAR_PYTHON_PACKAGE",
                                      str(pathlib.Path(os.environ["OSCAR_BIN"]).parent / "python")))


def texts(tokenizer):
    """Held-out texts of more than MAX_MODEL_LEN tokens, as ids."""
    with open(MODEL / "heldout.jsonl") as lines:
        found = [tokenizer(json.loads(line)["text"])["input_ids"] for line in lines]
    return [text for text in found if len(text) > MAX_MODEL_LEN]


@contextlib.contextmanager
def bundle_variable(path):
    """VLLM_OSCAR_BUNDLE as this; None: it is not set."""
    with mock.patch.dict(os.environ):
        os.environ.pop("VLLM_OSCAR_BUNDLE", None)
        if path is not None:
            os.environ["VLLM_OSCAR_BUNDLE"] = str(path)
        yield


def write_bundle(path, edit):
    """The bundle of the embedded model, edited (a function of the open file) and signed again."""
    from oscar_int2.bundle import content_sha256

    shutil.copy(BUNDLE, path)
    with h5py.File(path, "r+") as file:
        edit(file)
        objects = {"/": file}
        file.visititems(lambda name, item: objects.__setitem__("/" + name, item))
        file.attrs["content_sha256"] = np.bytes_(content_sha256(objects))


@contextlib.contextmanager
def edited_bundle(edit):
    """Path of write_bundle()'s, as long as it is needed."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "bundle.h5"
        write_bundle(path, edit)
        yield path


def without_samples(file):
    """An edit of a bundle: as one of an earlier version."""
    for layer in file["layers"].values():
        for name in ("weight_samples", "vector_samples"):
            layer.pop(name, None)


def samples_of_the_model(change=lambda samples: samples):
    """An edit of a bundle: samples of the embedded model's weights take the place of its own, as change() gives them back."""
    from oscar_int2 import load, weight_samples
    from transformers import AutoModelForCausalLM

    model, bundle = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16), load(BUNDLE)

    def edit(file):
        for i, block in enumerate(model.model.layers):
            parts = weight_samples.projections(block.self_attn, bundle.layers[i])[:4]
            samples = torch.stack([weight_samples.sample(matrix.data, 2, name == "W_O").float()
                                   for name, matrix in zip(weight_samples.MATRICES, parts)], 1)
            changed = change(samples).bfloat16().float().numpy()
            del file[f"layers/{i:03}/weight_samples"]
            file[f"layers/{i:03}"].create_dataset("weight_samples", data=changed, chunks=changed.shape,
                                                  fletcher32=True)

    return edit


class Records(logging.Handler):
    """The texts that vLLM logs."""

    def __init__(self):
        super().__init__()
        self.texts, self.levels = [], []  # levels: (level, text)

    def emit(self, record):
        self.texts.append(record.getMessage())
        self.levels.append((record.levelname, self.texts[-1]))

    def find(self, pattern):
        found = [m for m in (re.search(pattern, text) for text in self.texts) if m]
        assert found, f"{pattern!r} is in none of {len(self.texts)} log lines"
        return found[-1]


class Engine:
    """vLLM's engine with the plugin, in this process. `ids`: texts, where the model has no tokenizer."""

    def __init__(self, model=MODEL, ids=None, **options):
        from vllm.engine.arg_utils import EngineArgs

        options = {**OPTIONS, "skip_tokenizer_init": ids is not None, **options}
        EngineArgs(str(model), **options).create_engine_config()  # may set up the logger anew
        self.log = Records()
        logging.getLogger("vllm").addHandler(self.log)
        self.llm = vllm.LLM(str(model), **options)
        self.core = self.llm.llm_engine
        self.scheduler = self.core.engine_core.engine_core.scheduler
        self.runner = self.core.model_executor.driver_worker.worker.model_runner
        [self.builder] = [builder for groups in self.runner.attn_groups for group in groups
                          for builder in group.metadata_builders if hasattr(builder, "sink_blocks")]
        self.texts = texts(self.llm.get_tokenizer()) if ids is None else ids
        self.count = 0
        self.cached = {}  # tokens of prompts that came from shared blocks, by id of finished requests
        self.singles = {}  # answers of alone_once()

    def prompt(self, number, length):
        return self.texts[number][:length]

    def add(self, prompt, tokens, embeddings=None, **options):
        """A request, of token ids or of their embeddings; returns its id."""
        self.count += 1
        name = f"request-{self.count}"
        parameters = vllm.SamplingParams(**{"temperature": 0, "ignore_eos": True, "logprobs": 20, "max_tokens": tokens,
                                            "detokenize": False, **options})  # 20 texts a token would take long
        given = ({"prompt_token_ids": prompt} if embeddings is None
                 else {"prompt_embeds": embeddings})
        self.core.add_request(name, given, parameters)
        return name

    def step(self, finished):
        """One step; finished requests go into {id: CompletionOutput}. False: nothing is left."""
        for output in self.core.step():
            if output.finished:
                finished[output.request_id] = output.outputs[0]
                self.cached[output.request_id] = output.num_cached_tokens
        return self.core.has_unfinished_requests()

    def run(self):
        finished = {}
        while self.step(finished):
            pass
        return finished

    def settle(self):
        """Steps without requests, by which the worker learns who has ended."""
        core = self.core.engine_core.engine_core
        while core.scheduler.has_requests():
            core.step_fn()

    def forget(self):
        """Shares no block of a request before. Steps that are under way may hold one yet."""
        for _ in range(4):
            if self.core.reset_prefix_cache():
                return
            self.core.step()
        raise AssertionError("blocks stay held")

    def alone(self, prompt, tokens):
        """The answer of a request that shares nothing, while no other runs."""
        self.forget()
        name = self.add(prompt, tokens)
        return self.run()[name]

    def alone_once(self, prompt, tokens):
        """The same, of the first time that it is asked for: what other answers are compared with."""
        key = tuple(prompt), tokens
        if key not in self.singles:
            self.singles[key] = self.alone(prompt, tokens)
        return self.singles[key]

    def prompt_log_probabilities(self, prompt):
        """Of each token of a prompt behind its first."""
        name = self.add(prompt, 1, prompt_logprobs=0)
        outputs = []
        while not outputs:
            outputs = [o for o in self.core.step() if o.request_id == name and o.finished]
        return torch.tensor([step[token].logprob for step, token
                             in zip(outputs[0].prompt_logprobs[1:], prompt[1:])])

    @contextlib.contextmanager
    def in_chunks(self, tokens, of_one=0):
        """Steps of at most so many tokens, as max_num_batched_tokens; of_one: of one prompt."""
        scheduler, config = self.scheduler, self.scheduler.scheduler_config
        before = scheduler.max_num_scheduled_tokens, config.long_prefill_token_threshold
        scheduler.max_num_scheduled_tokens, config.long_prefill_token_threshold = tokens, of_one
        try:
            yield
        finally:
            scheduler.max_num_scheduled_tokens, config.long_prefill_token_threshold = before

    @contextlib.contextmanager
    def chunks(self):
        """A dict that takes, by id of a request, how many of its tokens each step has."""
        found, schedule = collections.defaultdict(list), self.scheduler.schedule

        def note(*args, **options):
            output = schedule(*args, **options)
            for request, tokens in output.num_scheduled_tokens.items():
                found[request.rsplit("-", 1)[0]].append(tokens)
            return output

        with mock.patch.object(self.scheduler, "schedule", note):
            yield found

    @contextlib.contextmanager
    def metadata(self):
        """A list that takes the metadata of each step."""
        found, build = [], self.builder.build
        self.builder.build = lambda *args, **options: found.append(build(*args, **options)) or found[-1]
        try:
            yield found
        finally:
            del self.builder.build

    @contextlib.contextmanager
    def preemptions(self):
        """A list that takes, of each preempted request, how many tokens it had computed."""
        found, preempt = [], self.scheduler._preempt_request

        def note(request, *args, **options):
            found.append(request.num_computed_tokens)
            return preempt(request, *args, **options)

        self.scheduler._preempt_request = note
        try:
            yield found
        finally:
            del self.scheduler._preempt_request

    def slots(self):
        """(those with a row that is no NaN in some layer, those that a request holds)"""
        written = [not bool(torch.stack([w[slot].isnan().all() for layer in self.builder.layers
                                         for w in (layer.window_k, layer.window_v)]).all())
                   for slot in range(MAX_NUM_SEQS)]
        return ([slot for slot in range(MAX_NUM_SEQS) if written[slot]],
                sorted(self.builder.slots.of.values()))


class EngineTest(unittest.TestCase):
    """Of a class with an `engine`: each test begins without shared blocks."""

    engine: Engine | None = None

    def setUp(self):
        if self.engine is not None:
            self.engine.forget()

    def check(self, prompt, output, bound=DRIFT / 4, model=None):
        """Log probabilities of an answer are those of a request that shares nothing. `model`: of
        model_in_transformers(), in place of the embedded one."""
        ours = log_probabilities_in_transformers(prompt, output.token_ids, model)
        theirs = [step[token].logprob for step, token in zip(output.logprobs, output.token_ids)]
        self.assertLess((torch.tensor(ours) - torch.tensor(theirs)).abs().mean(), bound)

    def same(self, one, other, what):
        """Tokens of two runs are equal, or part where two are equally probable. Returns whether
        they are equal."""
        self.assertEqual(len(one.token_ids), len(other.token_ids), what)
        end, drift, gap = first_difference(one, other)
        self.assertLess(drift, DRIFT, f"{what}: log probabilities differ")
        self.assertLess(gap, TIE, f"{what}: tokens differ from number {end} on")
        return end is None


def first_difference(one, other):
    """Of two CompletionOutputs: (index of the first token that differs or None, what the log
    probability of the same token differs by at most until there, and how much less probable the
    other's token is than one's own, in the run where that is more)."""
    ids = list(zip(one.token_ids, other.token_ids))
    end = next((i for i, (a, b) in enumerate(ids) if a != b), None)
    pairs = list(zip(one.logprobs, other.logprobs))[:end]
    drift = max((abs(x[t].logprob - y[t].logprob) if t in y else float("inf")
                 for (t, _), (x, y) in zip(ids, pairs)), default=0.0)
    gap = 0.0
    if end is not None:
        a, b = ids[end]
        x, y = one.logprobs[end], other.logprobs[end]
        gap = max(x[a].logprob - x[b].logprob if b in x else float("inf"),
                  y[b].logprob - y[a].logprob if a in y else float("inf"))
    return end, drift, gap


@functools.cache
def model_in_transformers(folder=MODEL):
    from transformers import AutoModelForCausalLM
    from oscar_int2.transformers import apply

    # Where vLLM runs: rows that other sums made are now and then other codes.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device)
    return apply(model, BUNDLE, weights="same" if folder == MODEL else "any")


def log_probabilities_in_transformers(prompt, answer, model=None):
    """Of each token of an answer, from transformers' model over the package's cache, fed with it."""
    return _log_probabilities_in_transformers(tuple(prompt), tuple(answer), model or model_in_transformers())


@functools.cache
@torch.inference_mode()
def _log_probabilities_in_transformers(prompt, answer, model):
    from oscar_int2.transformers import OscarCache

    cache = OscarCache(model, 1, len(prompt) + len(answer))
    fed = (torch.tensor([list(tokens)], device=model.device) for tokens in (prompt, *([token] for token in answer[:-1])))
    logits = [model(tokens, past_key_values=cache).logits[0, -1] for tokens in fed]
    cache.check_rows()
    return [x.float().log_softmax(-1)[token].item() for x, token in zip(logits, answer)]


if vllm:
    install_plugin()
