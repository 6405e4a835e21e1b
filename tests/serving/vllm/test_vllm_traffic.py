#!/usr/bin/env python3
"""A round of random_traffic.py; half an hour of it is run by hand."""
import unittest

import random_traffic
import vllm_case as case


@case.needs_vllm
class Traffic(unittest.TestCase):
    def test_random_requests_get_their_own_answers_and_leave_nothing_behind(self):
        found = random_traffic.run(random_traffic.engine_for_traffic(), 1, rounds=1, requests=7)
        self.assertEqual(found["wrong"], [])
        for what in ("preemptions", "samples", "aborts", "reloads", *["bad rows"][:case.RUNNER == 1]):
            self.assertGreater(found[what], 0, what)


if __name__ == "__main__":
    unittest.main(verbosity=2)
