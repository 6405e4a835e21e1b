#!/usr/bin/env python3
"""lm-eval over the 2-bit cache, on two local tasks: log-likelihoods beside oscar-eval's, answers beside generate()'s."""
import contextlib
import importlib.util
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from serving_case import BIN, BUNDLE, MODEL
import oscar_int2
import oscar_int2.cache
from oscar_int2.transformers import apply

if importlib.util.find_spec("lm_eval"):
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import CachingLM
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager
    from oscar_int2.lm_eval import OscarInt2LM

ROWS, TOKENS, PROMPT, ANSWER = 3, 640, 448, 24
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/{documents}.jsonl}}, cache_dir: {folder}/cache}}
test_split: test
target_delimiter: ""
doc_to_text: "{{{{context}}}}"
doc_to_target: "{{{{continuation}}}}"
output_type: {kind}
"""
LIKELIHOOD = "metric_list: [{metric: acc}]\n"
GENERATION = f"metric_list: [{{metric: exact_match}}]\ngeneration_kwargs: {{until: [], do_sample: false, max_gen_toks: {ANSWER}}}\n"


def documents(tokenizer):
    """Ids of held-out documents whose text, whole and cut at PROMPT, has these ids again."""
    def survives(ids):
        return tokenizer(tokenizer.decode(ids))["input_ids"] == ids

    found = []
    for line in (MODEL / "heldout.jsonl").read_text().splitlines():
        ids = tokenizer(json.loads(line)["text"])["input_ids"][:TOKENS]
        if len(ids) == TOKENS and survives(ids) and survives(ids[:PROMPT]):
            found.append(ids)
    return found[:ROWS]


@unittest.skipUnless(importlib.util.find_spec("lm_eval"), "lm-eval is not installed")
class LmEval(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        scratch = tempfile.TemporaryDirectory()
        cls.addClassCleanup(scratch.cleanup)
        cls.folder = pathlib.Path(scratch.name)
        cls.tokenizer = AutoTokenizer.from_pretrained(MODEL)
        cls.ids = documents(cls.tokenizer)
        assert len(cls.ids) == ROWS
        for name, kind, rest in (("likelihood", "loglikelihood", LIKELIHOOD), ("short", "loglikelihood", LIKELIHOOD),
                                 ("generation", "generate_until", GENERATION)):
            text = TASK.format(name=name, kind=kind, folder=cls.folder, documents="short" if name == "short" else "long")
            (cls.folder / f"{name}.yaml").write_text(text + rest)
        cls.write_documents("long", cls.ids, PROMPT)
        # Of answers; likelihoods take the bundle's by themselves.
        cls.block = oscar_int2.load(BUNDLE).quantizer.demote_block
        # One process for both tasks: lm-eval takes seconds to begin.
        cls.out = cls.folder / "out"
        result = subprocess.run(
            [sys.executable, "-m", "oscar_int2", "lm-eval", "--model", "oscar_int2", "--tasks", "likelihood,generation",
             "--include_path", cls.folder, "--model_args",
             f"pretrained={MODEL},bundle={BUNDLE},dtype=float32,demote_block={cls.block}", "--device", "cpu",
             "--batch_size", "4", "--output_path", cls.out, "--log_samples"],
            capture_output=True, text=True, timeout=600,
            env=os.environ | {"PYTHONPATH": str(BIN.parent / "python"), "HF_HUB_OFFLINE": "1",
                              "HF_HOME": str(cls.folder / "home")})
        assert result.returncode == 0, result.stderr
        cls.said = result.stdout + result.stderr

    @classmethod
    def write_documents(cls, name, rows, prompt):
        with open(cls.folder / f"{name}.jsonl", "w") as file:
            for ids in rows:
                context, whole = cls.tokenizer.decode(ids[:prompt]), cls.tokenizer.decode(ids)
                file.write(json.dumps({"context": context, "continuation": whole[len(context):]}) + "\n")

    def samples(self, task):
        """In the order of the documents."""
        path, = self.out.rglob(f"samples_{task}_*.jsonl")
        return sorted(map(json.loads, path.read_text().splitlines()), key=lambda sample: sample["doc_id"])

    def test_likelihoods_are_those_of_oscar_evals_decode_mode(self):
        np.save(self.folder / "ids.npy", np.array(self.ids, np.int32))
        subprocess.run([BIN / "oscar-eval", MODEL, "--corpus", self.folder / "ids.npy", "--bundle", BUNDLE, "--compare",
                        "bundle", "--mode", "decode", "--first-position", str(PROMPT), "--keep-units", "--separators", "off",
                        "--device", "cpu", "--quiet", "--json", self.folder / "report.json"], check=True)
        methods = json.loads((self.folder / "report.json").read_text())["methods"]
        theirs, exact = (np.array(methods[name]["units"]["nll"]) for name in ("bundle", "bf16"))
        ours = np.array([-float(sample["resps"][0][0][0]) for sample in self.samples("likelihood")]) / (TOKENS - PROMPT)
        model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
        apply(model, BUNDLE, prompts="int2")
        ids = torch.tensor(self.ids)
        with torch.no_grad():
            log_p = model(ids[:, :-1], use_cache=False).logits[:, PROMPT - 1:].log_softmax(-1)  # of lm-eval's shape
        nll = -log_p.gather(-1, ids[:, PROMPT:, None])[..., 0].mean(1).numpy()
        np.testing.assert_allclose(ours, nll, atol=1e-4)
        self.assertGreater(abs(ours - exact).max(), 1e-3)  # these are not BF16's
        # Of one row, as in test_transformers_prompts.py: oscar-eval's own engines differ by .0025.
        np.testing.assert_allclose(ours, theirs, atol=5e-3)

    def test_answers_are_those_of_generate(self):
        model = apply(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32), BUNDLE, demote_block=self.block)
        for ids, sample in zip(self.ids, self.samples("generation"), strict=True):
            answer = model.generate(torch.tensor([ids[:PROMPT]]), max_new_tokens=ANSWER, do_sample=False)[0, PROMPT:]
            self.assertEqual(sample["resps"], [[self.tokenizer.decode(answer, skip_special_tokens=True)]])

    def test_results_say_which_bundle_it_was_and_how_many_requests_read_2_bit_rows(self):
        path, = self.out.rglob("results_*.json")
        about = json.loads(path.read_text())["config"]["oscar_int2"]
        self.assertEqual(about["content_sha256"], oscar_int2.load(BUNDLE).content_sha256)
        self.assertEqual((about["requests"], about["requests_with_2_bit_rows"]), (2 * ROWS, 2 * ROWS))
        self.assertNotIn("baseline's", self.said)

    def test_requests_are_counted_by_the_2_bit_rows_that_their_predictions_read(self):
        """Windows of 64 + 256 tokens, one leaving at a time: the pass or step of the 321st token reads a row, and the last
        token of a request is predicted, but never read."""
        lm = self.model()
        with mock.patch.object(oscar_int2.cache, "attend_as_steps", wraps=oscar_int2.cache.attend_as_steps) as attend:
            for tokens, rows in ((321, 0), (322, 1)):
                lm._counts["requests_with_2_bit_rows"] = 0
                lm._loglikelihood_tokens([(("a", "b"), self.ids[0][:300], self.ids[0][300:tokens])], disable_tqdm=True)
                self.assertEqual(attend.call_args.args[2].shape[1], rows)
                self.assertEqual(lm._counts["requests_with_2_bit_rows"], rows, tokens)
        # Of prompt and answer: what the last step read. A prompt attends exactly.
        for prompt, tokens, rows in ((319, 2, 0), (319, 3, 1), (400, 1, 0), (400, 2, 81)):
            lm._counts["requests_with_2_bit_rows"] = 0
            self.answers(lm, [self.ids[0][:prompt]], tokens, [])
            step = lm.model.oscar_int2.kept.paged.step
            self.assertEqual(int(step.new_history) * (tokens > 1), rows)
            self.assertEqual(lm._counts["requests_with_2_bit_rows"], int(rows > 0), (prompt, tokens))
        lm._max_length = 320  # a longer request loses its beginning
        lm._counts["requests_with_2_bit_rows"] = 0
        lm._loglikelihood_tokens([(("a", "b"), self.ids[0][:300], self.ids[0][300:400])], disable_tqdm=True)
        self.assertEqual(lm._counts["requests_with_2_bit_rows"], 0)

    def test_what_runs_on_behind_the_end_of_an_answer_is_not_counted(self):
        lm, prompts = self.model(), [self.ids[0][:315], self.ids[1][:315]]
        first, second = self.answers(lm, prompts, 12, [])
        self.assertEqual(lm._counts["requests_with_2_bit_rows"], 2)
        lm._counts["requests_with_2_bit_rows"] = 0
        stop = self.tokenizer.decode(self.tokenizer(first)["input_ids"][:3])
        self.assertNotIn(stop, second)
        self.assertEqual(self.answers(lm, prompts, 12, [stop]), [first[:first.index(stop)], second])
        self.assertEqual(lm._counts["requests_with_2_bit_rows"], 1)
        third = self.tokenizer(second)["input_ids"][2]  # ends an answer as the end of sequence does
        lm.model.generation_config.eos_token_id = [0, third]
        lm._counts["requests_with_2_bit_rows"] = 0
        self.answers(lm, prompts, 12, [stop])
        self.assertEqual(lm._counts["requests_with_2_bit_rows"], 0)

    def test_sums_of_a_bf16_model_are_in_float32(self):
        lm = OscarInt2LM(pretrained=str(MODEL), bundle=str(BUNDLE), dtype="bfloat16", device="cpu", batch_size=1)
        [(found, _)] = lm._loglikelihood_tokens([(("a", "b"), self.ids[0][:1], self.ids[0][1:])], disable_tqdm=True)
        with torch.no_grad():
            log_p = lm.model(torch.tensor([self.ids[0][:-1]]), use_cache=False).logits[0].double().log_softmax(-1)
        expected = log_p.gather(-1, torch.tensor(self.ids[0][1:])[:, None]).sum().item()
        self.assertLess(expected, -1000)
        self.assertAlmostEqual(found, expected, delta=0.05)

    def test_stored_answers_are_refused(self):
        stored = mock.Mock(SqliteDict=lambda *_, **__: {})
        with mock.patch.dict(sys.modules, {"sqlitedict": stored}), self.assertRaisesRegex(
                oscar_int2.UnsupportedError, "--use_cache .*by the request alone"):
            CachingLM(self.model(), str(self.folder / "answers.db"))

    def model(self):
        return OscarInt2LM(pretrained=str(MODEL), bundle=str(BUNDLE), dtype="float32", device="cpu", demote_block=1, batch_size=2)

    def answers(self, lm, prompts, tokens, until):
        """Greedy answers to ids."""
        options = {"until": until, "max_gen_toks": tokens, "do_sample": False}
        return lm.generate_until([Instance("generate_until", {}, (self.tokenizer.decode(ids), options), 0) for ids in prompts],
                                 disable_tqdm=True)

    def test_tasks_of_few_tokens_are_warned_of(self):
        self.write_documents("short", [ids[:PROMPT // 2] for ids in self.ids[:2]], PROMPT // 4)
        tasks = TaskManager(include_path=str(self.folder), include_defaults=False)  # reading the defaults takes 15 seconds
        with contextlib.redirect_stderr(io.StringIO()) as said:
            results = simple_evaluate(self.model(), tasks=["short"], task_manager=tasks)
        self.assertIn(f"no request reached {64 + 256 + 1 + 1} tokens", said.getvalue())
        about = results["config"]["oscar_int2"]
        self.assertEqual((about["requests"], about["requests_with_2_bit_rows"]), (2, 0))


if __name__ == "__main__":
    unittest.main()
