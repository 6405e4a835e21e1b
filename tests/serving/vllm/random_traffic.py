#!/usr/bin/env python3
"""Random traffic against one engine over INT2, and what it must not do: wrong tokens, leaks, a dead engine.

    tests/serving/vllm/random_traffic.py --minutes 30 [--seed 1] [--without reloads,bad-rows]

Requests of all kinds come and go at random in an engine whose pool is too small for them: several samples of
a prompt, shared beginnings, more of them than sinks are kept, prompts in chunks of any size, aborts,
preemption, weights that are loaded again while requests run, prompts with rows that cannot be coded. Each
round ends when all have ended. Then the answers are read again, each alone: its prompt at once, and its
tokens one by one behind that. This is the reference. It differs from the traffic by bf16 sums of other sizes,
and by rows that were read as 2 bits where a prompt came in chunks, began with shared blocks or was preempted.
So a greedy answer that is off is generated once more, alone, in the steps that it came in: as many shared
tokens, the same chunks, the same preemptions. If that differs too, it is generated in those steps beside
other requests, drawn anew REPEATS times at most: they change how many rows a product has, and in which chunks
shared tokens were read. An answer that none of them gives is wrong. In half an hour on an H200 (53,690
tokens) nine answers were off: eight came again alone, one at the second try beside others.

On a GPU the steps run in CUDA graphs. Environment: as for the tests (tests/CMakeLists.txt). The last line is
what was found, in JSON; the exit status is 1 if anything is not as it must be.
"""
import argparse
import collections
import contextlib
import functools
import gc
import json
import os
import random
import sys
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest import mock

import vllm_case as case
import torch
from vllm_case import vllm

INGREDIENTS = ("samples", "aborts", "chunks", "prefixes", "reloads", "bad-rows")
# Nats. A greedy token may be so much less likely in the reference than its likeliest one; log probabilities of
# an answer's tokens are so far apart in the mean, of FEW tokens or more; with fewer, each.
MOST_BEHIND, MOST_APART = 0.3, 0.2
FEW, MOST_APART_OF_FEW = 4, 1.0
MOST_GROWTH = 1 << 20  # of the tensors that are held behind the first rounds, bytes
WARM_ROUNDS = 2
REPEATS = 12  # in other company
# One request of the most tokens fits, three of a few hundred do not.
MOST_TOKENS, POOL_BLOCKS, BLOCK_BYTES = 704, 19, 73728
# Fewer than there are beginnings.
KEPT_SINKS, SINK_BYTES = 3, 524288


@dataclass
class Sent:
    """A request and its answers."""

    prompt: list
    tokens: int
    greedy: bool
    bad: bool = False
    aborted: bool = False
    answers: list = field(default_factory=list)  # CompletionOutputs
    passes: list = field(default_factory=list)  # of a sole sample: steps (first token, tokens) between preemptions
    drafts: int = 0  # of its last step


class Traffic:
    def __init__(self, engine, seed, without=()):
        self.engine, self.source, self.without = engine, random.Random(seed), set(without)
        if case.RUNNER == 2:  # which takes no embeddings
            self.without.add("bad-rows")
        self.inner = engine.core.engine_core.engine_core
        self.requests, self.counts, self.wrong = {}, collections.Counter(), []
        self.behind, self.apart = [], []  # of all greedy tokens; of all answers
        self.free = self._free_blocks()

    def chance(self, share, ingredient=None):
        return ingredient not in self.without and self.source.random() < share

    # What comes in.

    def prompt(self):
        source, engine = self.source, self.engine
        if self.chance(0.2):
            return engine.prompt(source.randrange(len(engine.texts)), source.randrange(1, 80))
        if self.chance(0.5, "prefixes"):
            begin = engine.prompt(3, source.randrange(420, 500))
        else:
            begin = engine.prompt(source.randrange(5), source.randrange(64, 500))
        return begin + engine.prompt(source.randrange(5), source.randrange(1, 120))

    def crowd(self):
        """Requests that fill the pool, and need more of it for their answers."""
        for number in range(case.MAX_NUM_SEQS):
            length = (POOL_BLOCKS - 1) // case.MAX_NUM_SEQS * 64 - 6
            self.send(self.engine.prompt(number, length), 30, bad=False)

    def send(self, prompt=None, tokens=None, bad=None):
        source = self.source
        prompt, tokens = prompt or self.prompt(), tokens or source.choice((1, 4, 12, 30, 60))
        bad, samples = self.chance(0.1, "bad-rows") if bad is None else bad, 1
        greedy = self.chance(0.6)
        options = {"logprobs": 20}
        if not greedy:
            samples = source.choice((1, 2, 3)) if self.chance(1, "samples") else 1
            options |= {"temperature": 0.9, "n": samples}
            if torch.cuda.is_available():  # vLLM's CPU engine ends by a seed and a prompt in chunks
                options["seed"] = source.randrange(1 << 30)
        if bad:
            rows = self._embeddings(prompt)
            rows[source.randrange(len(prompt))] = source.choice((torch.inf, -torch.inf, torch.nan))
            name = self.engine.add(prompt, tokens, embeddings=rows, **options)
        else:
            name = self.engine.add(prompt, tokens, **options)
        self.requests[name] = Sent(prompt, tokens, greedy, bad)
        self.counts["requests"] += 1
        self.counts["samples"] += samples
        self.counts["bad rows"] += bad

    def _embeddings(self, prompt):
        model = self.inner.model_executor.driver_worker.worker.model_runner.get_model()
        ids = torch.tensor(prompt, device=self.engine.builder.device)
        return model.embed_input_ids(ids).detach().cpu()

    # A round.

    def round(self, requests):
        """So many requests, at random times, until all have ended; then what became of them."""
        source = self.source
        chunk = source.choice((40, 64, 150, 400)) if self.chance(0.7, "chunks") else 3072
        of_one = source.choice((0, 30, 100)) if chunk < 3072 else 0
        preempt = self.inner.scheduler._preempt_request
        with (self.engine.in_chunks(chunk, of_one=of_one), self.engine.preemptions() as preempted,
              self._noted_steps()):
            self.crowd()
            to_send, step, abort_at, reload_at = requests - case.MAX_NUM_SEQS, 0, *source.sample(range(4, 20), 2)
            while to_send or self.engine.core.has_unfinished_requests():
                while to_send and self.chance(0.3):
                    to_send -= 1
                    self.send(bad=None if to_send or "bad-rows" in self.without else True)
                step += 1
                if self.chance(step == abort_at or 0.02, "aborts"):
                    self._abort()
                if self.chance(step == reload_at or 0.01, "reloads"):
                    self.engine.llm.collective_rpc("reload_weights")
                    self.counts["reloads"] += 1
                self._step()
        assert self.inner.scheduler._preempt_request == preempt
        hits, misses = self.inner.scheduler.oscar_prefixes.take_counts()
        self.counts["sink hits"] += hits
        self.counts["sink misses"] += misses
        self.counts["preemptions"] += len(preempted)
        self.counts["rounds"] += 1
        self._settle()
        for name, sent in self.requests.items():
            self._check(name, sent)
        self.requests.clear()
        self._settle()
        print(f"round {self.counts['rounds']}: {dict(self.counts)}", flush=True)

    def _step(self):
        self.counts["steps"] += 1
        for output in self.engine.core.step():
            if output.finished and output.request_id in self.requests:
                sent = self.requests[output.request_id]
                sent.answers = output.outputs
                self.counts["shared tokens"] += output.num_cached_tokens or 0

    @contextlib.contextmanager
    def _noted_steps(self):
        """Requests learn in which steps they were computed."""
        scheduler, schedule = self.inner.scheduler, self.inner.scheduler.schedule

        def note(*args, **options):
            output = schedule(*args, **options)
            new, known = output.scheduled_new_reqs, output.scheduled_cached_reqs
            begins = dict(zip(known.req_ids, known.num_computed_tokens))
            begins |= {request.req_id: request.num_computed_tokens for request in new}
            for id, tokens in output.num_scheduled_tokens.items():
                sent = self.requests.get(id.rsplit("-", 1)[0])  # vLLM's id is ours, and letters of its own
                if sent:
                    if sent.drafts:
                        self._end_at_rejected(sent, scheduler.requests[id].num_tokens - 1)
                    sent.drafts = len(output.scheduled_spec_decode_tokens.get(id, ()))
                    if not sent.passes or id in known.resumed_req_ids:
                        sent.passes.append([])
                    sent.passes[-1].append((begins[id], tokens))
            return output

        scheduler.schedule = note
        try:
            yield
        finally:
            del scheduler.schedule

    def _end_at_rejected(self, sent, computed):
        """Of its last step, a request keeps the drafts that were accepted: so many tokens are computed."""
        begin, tokens = sent.passes[-1].pop()
        sent.passes[-1].append((begin, computed - begin))
        rejected = begin + tokens - computed
        self.counts["rejected drafts"] += rejected
        self.counts["accepted drafts"] += sent.drafts - rejected

    def _abort(self):
        running = [name for name, sent in self.requests.items() if not sent.answers and not sent.aborted]
        if running:
            name = self.source.choice(running)
            self.requests[name].aborted = True
            self.engine.core.abort_request([name])
            self.counts["aborts"] += 1

    def _settle(self):
        """Finds everything given back."""
        self.engine.settle()
        held = self.engine.builder.slots.of
        self._expect(self._free_blocks() == self.free, f"{self._free_blocks()} blocks are free of {self.free}")
        self._expect(not held, f"slots are held: {held}")
        for what, found in (("scheduler", self.inner.scheduler.requests),
                            ("output processor", self.engine.core.output_processor.request_states)):
            self._expect(not found, f"the {what} has requests: {list(found)}")

    def _free_blocks(self):
        return self.inner.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    # What came out.

    def _check(self, name, sent):
        if sent.aborted:
            return
        self._expect(sent.answers, f"{name} has no answer")
        expected = ("error", 0) if sent.bad else ("length", sent.tokens)
        for answer in sent.answers:
            ended = answer.finish_reason, len(answer.token_ids)
            self._expect(ended == expected, f"{name} ended with {ended} and not with {expected}")
        if sent.answers and not sent.bad:  # one of its samples: reading a prompt takes long on a CPU
            self._compare(name, sent, self.source.choice(sent.answers))

    def _compare(self, name, sent, answer):
        ids = list(answer.token_ids)
        reference = self._read_again(sent.prompt, ids)
        said = [step[token].logprob for step, token in zip(answer.logprobs, ids)]
        apart = [abs(ours - theirs) for ours, (theirs, _) in zip(said, reference)]
        mean, behind = sum(apart) / len(ids), [best - theirs for theirs, best in reference if sent.greedy]
        self.counts["tokens"] += len(ids)
        most = max(behind, default=0.0)
        if sent.greedy and (most > MOST_BEHIND or mean > MOST_APART):
            self.counts["generated again"] += 1
            self._generate_again(name, sent, answer)
            return
        self.apart.append(mean)
        self.behind += behind
        self._expect(mean <= MOST_APART if len(ids) >= FEW else max(apart) <= MOST_APART_OF_FEW,
                     f"{name}: {len(sent.prompt)} + {len(ids)} tokens, {mean:.3f} nats from the reference in the mean")

    def _generate_again(self, name, sent, answer):
        """Compares an answer with what its request gives alone, in the same steps."""
        before = 0  # tokens of the answer that there were when a pass began
        for steps in sent.passes:
            prompt, shared = sent.prompt + list(answer.token_ids[:before]), steps[0][0]
            # The last step may have had drafts behind the end.
            after = min(max(sum(steps[-1]) - len(sent.prompt) + 1, before), len(answer.token_ids))
            if after > before:
                part = slice(before, after)
                theirs = SimpleNamespace(token_ids=answer.token_ids[part], logprobs=answer.logprobs[part])
                what = f"{name}: {len(prompt)} + {after - before} tokens in steps {steps[:8]}"
                arguments = name, prompt, steps, after - before
                self._find_again(what, theirs, functools.partial(self._in_steps, *arguments))
            before = after

    def _find_again(self, what, theirs, generate):
        """Generates an answer alone, then in company, until it comes again."""
        alone = None
        for company in (False, *[True] * REPEATS):
            ours = generate(company)
            alone = alone or ours
            _, drift, gap = case.first_difference(theirs, ours)
            print(f"{what}, {'in company' if company else 'alone'}: {drift:.3f}, {gap:.3f} from it; from the one"
                  " alone {1:.3f}, {2:.3f} (at {0})".format(*case.first_difference(alone, ours)), flush=True)
            if drift < case.DRIFT and gap < case.TIE:
                self.counts["found again in company"] += company
                return
        self._expect(False, f"{what} the answer does not come again: it is {list(theirs.token_ids)}, alone"
                     f" {list(alone.token_ids)}")

    def _company(self, prompt, tokens):
        """Requests beside one of so many tokens, where the pool has room. Their names."""
        source, names = self.source, []
        room = POOL_BLOCKS - 1 - -(-(len(prompt) + tokens) // 64)
        for _ in range(source.randrange(1, case.MAX_NUM_SEQS)):
            most = room // (case.MAX_NUM_SEQS - 1) * 64
            if most:
                text = self.engine.prompt(source.randrange(5), MOST_TOKENS)
                begin = next(i for i in range(source.randrange(300), MOST_TOKENS) if text[i] != prompt[0])
                length = source.randrange(1, most)
                names.append(self.engine.add(text[begin:][:length], source.randrange(1, most - length + 1)))
        return names

    def _in_steps(self, name, prompt, steps, tokens, company):
        """The answer to a prompt in these steps, the first of which comes behind shared tokens."""
        scheduler, shared, finished = self.inner.scheduler, steps[0][0], {}
        self.engine.core.reset_prefix_cache()
        if shared:  # their pages are written
            other = [token for token in self.engine.prompt(0, 400) if token != prompt[shared]]
            with self.engine.in_chunks(self.source.choice((40, 64, 150, 400)) if company else MOST_TOKENS):
                self.engine.alone(prompt[:shared] + other[:MOST_TOKENS - shared - 1], 1)
        with self.engine.in_chunks(MOST_TOKENS), self.engine.preemptions() as preempted:
            again = self.engine.add(prompt, tokens)
            others = self._company(prompt, tokens) if company else []
            for begin, own in steps:
                more = self.source.randrange(MOST_TOKENS) if company else 0
                scheduler.max_num_scheduled_tokens = own + more
                ends = begin + own >= len(prompt)
                scheduler.scheduler_config.long_prefill_token_threshold = 0 if ends else own
                self.engine.step(finished)
            while again not in finished:  # fewer drafts may be accepted
                self.engine.step(finished)
            self.engine.core.abort_request(others)
        self.engine.settle()
        self._expect(not preempted, f"{name} or its company was preempted when it was generated again")
        found = self.engine.cached.get(again)
        self._expect(found == shared, f"{name} began with {found} shared tokens and not with {shared}")
        return finished[again]

    def _read_again(self, prompt, answer):
        """(log probability, that of the likeliest token) of each token of an answer, alone."""
        outputs, scheduler = [], self.inner.scheduler
        with self.engine.in_chunks(len(prompt)):
            name = self.engine.add(prompt + answer, 1, prompt_logprobs=1)
            while not outputs:
                outputs = [o for o in self.engine.core.step() if o.request_id == name and o.finished]
                scheduler.max_num_scheduled_tokens = 1
        steps = outputs[0].prompt_logprobs[len(prompt):]
        return [(step[token].logprob, max(one.logprob for one in step.values()))
                for step, token in zip(steps, answer)]

    def _expect(self, good, problem):
        if not good:
            self.wrong.append(problem)
            print(f"WRONG: {problem}", flush=True)


def held_bytes():
    """Of all tensors that Python holds, wherever they are."""
    gc.collect()
    storages = {}
    for tensor in gc.get_objects():
        if issubclass(type(tensor), torch.Tensor) and tensor.layout == torch.strided and not tensor.is_meta:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def resident_bytes():
    """Of the process. vLLM's CPU engine keeps what it compiles for each number of rows: with BF16 too it grows by
    a MiB for each new length of a prompt."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run(engine, seed, *, minutes=0.0, rounds=1, requests=12, without=()):
    """Rounds for so many minutes, at least `rounds`. Returns what was found, as a dictionary."""
    traffic, began, before = Traffic(engine, seed, without), time.monotonic(), None
    question = engine.prompt(4, 700)
    first = engine.alone(question, 16)
    while traffic.counts["rounds"] < rounds or time.monotonic() - began < 60 * minutes:
        traffic.round(requests)
        engine.cached.clear()
        if traffic.counts["rounds"] == WARM_ROUNDS:
            before, resident = held_bytes(), resident_bytes()
            device_before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    engine.core.reset_prefix_cache()
    end, drift, gap = case.first_difference(first, engine.alone(question, 16))
    traffic._expect(drift < case.DRIFT and gap < case.TIE, f"the first question's answer is another: {end}")
    found = {"seed": seed, "minutes": round((time.monotonic() - began) / 60, 2), **traffic.counts,
             "most_behind": max(traffic.behind, default=0.0), "most_apart": max(traffic.apart, default=0.0),
             "mean_apart": sum(traffic.apart) / max(len(traffic.apart), 1)}
    if before is not None:
        grown = held_bytes() - before
        found |= {"grown": grown, "resident_grown_mib": round((resident_bytes() - resident) / 2**20, 1)}
        traffic._expect(grown < MOST_GROWTH, f"{grown} bytes more are held in tensors")
        if torch.cuda.is_available():
            grown = torch.cuda.memory_allocated() - device_before
            traffic._expect(grown <= 0, f"{grown} bytes more are held on the device")
    return found | {"wrong": traffic.wrong}


def engine_for_traffic(**options):
    graphs = {"enforce_eager": False, "compilation_config": {
        "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}} if torch.cuda.is_available() else {}
    options = {"enable_prompt_embeds": case.RUNNER == 1, **graphs, **options}
    with mock.patch.dict(os.environ, VLLM_OSCAR_SINK_BYTES=str(KEPT_SINKS * SINK_BYTES)):
        return case.Engine(kv_cache_memory_bytes=POOL_BLOCKS * BLOCK_BYTES, max_model_len=MOST_TOKENS, **options)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=1, help="at least so many")
    parser.add_argument("--requests", type=int, default=12, help="of a round")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--without", default="", help=f"of {','.join(INGREDIENTS)}")
    arguments = parser.parse_args()
    without = [name for name in arguments.without.split(",") if name]
    if set(without) - set(INGREDIENTS):
        parser.error(f"--without takes names of {', '.join(INGREDIENTS)}")
    if vllm is None:
        sys.exit("random_traffic: there is no vLLM here; scripts/setup_vllm.sh installs one")
    found = run(engine_for_traffic(), arguments.seed, minutes=arguments.minutes, rounds=arguments.rounds,
                requests=arguments.requests, without=without)
    print(json.dumps(found))
    sys.exit(1 if found["wrong"] else 0)


if __name__ == "__main__":
    main()
