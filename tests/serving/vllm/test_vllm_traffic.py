#!/usr/bin/env python3
"""Rounds of random_traffic.py; half an hour of it is run by hand."""
import unittest

import random_traffic
import torch
import vllm_case as case


@case.needs_vllm
class Traffic(unittest.TestCase):
    def test_random_requests_get_their_own_answers_and_leave_nothing_behind(self):
        found = random_traffic.run(random_traffic.engine_for_traffic(), 1, rounds=1, requests=7)
        self.assertEqual(found["wrong"], [])
        for what in ("preemptions", "samples", "aborts", "reloads", *["bad rows"][:case.RUNNER == 1]):
            self.assertGreater(found[what], 0, what)


@case.needs_vllm
@unittest.skipIf(case.RUNNER == 2, "vLLM 0.26's second model runner takes no drafts of the text itself")
class WithDrafts(unittest.TestCase):
    def test_requests_with_drafts_that_are_preempted_or_aborted_leave_nothing_behind(self):
        """And the others get their own answers. More drafts than a call of the attention kernel takes."""
        engine = random_traffic.engine_for_traffic(enable_prompt_embeds=False, speculative_config={
            "method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3, "prompt_lookup_min": 1})
        found = random_traffic.run(engine, 2, rounds=6 if torch.cuda.is_available() else 2, requests=7,
                                   without=("bad-rows",))
        self.assertEqual(found["wrong"], [])
        for what in ("preemptions", "samples", "aborts", "reloads", "accepted drafts", "rejected drafts"):
            self.assertGreater(found[what], 0, what)


if __name__ == "__main__":
    unittest.main(verbosity=2)
