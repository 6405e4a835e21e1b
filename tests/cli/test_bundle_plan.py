#!/usr/bin/env python3
"""oscar-bundle plan: what is read, what is said in 80 columns, and what is refused."""
import json
import unittest

from support.programs import SOURCE, ProgramTest

BUNDLE = SOURCE / "rotation_zoo" / "tiny-gqa" / "tiny-gqa.h5"


class Plan(ProgramTest):
    def plan(self, *arguments):
        return json.loads(self.run_ok("oscar-bundle", "plan", *arguments, "--json", "-").stdout)

    def test_a_folder_and_the_bundle_of_its_model_give_the_same_cache(self):
        folder, bundle = self.plan("tiny-gqa", "--context", 8192), self.plan(BUNDLE, "--context", 8192)
        self.assertEqual(folder["contexts"], bundle["contexts"])
        (row,) = [r for r in folder["contexts"] if r["context"] == 8192]
        self.assertEqual(row["bytes_per_token"]["bf16"], 8 * 2 * 256 * 2)  # layers, heads, K and V
        self.assertAlmostEqual(row["int2_bits_per_value"], (16 * 320 + 2.25 * 7872) / 8192)
        weights = (SOURCE / "datasets/tiny-gqa").glob("*.safetensors")
        self.assertEqual(folder["weight_bytes"], sum(file.stat().st_size for file in weights))
        self.assertIsNone(bundle["weight_bytes"])

    def test_requests_fit_beside_the_weights_that_are_given(self):
        plan = self.plan(BUNDLE, "--gpu-memory", "2G", "--weights", "1G", "--context", 8192, "--utilization", 1)
        (row,) = [r for r in plan["contexts"] if r["context"] == 8192]
        self.assertEqual(row["requests"]["bf16"], 2**30 // (8192 * 8192))
        self.assertGreater(row["requests"]["int2"], 5 * row["requests"]["bf16"])
        self.assertEqual(plan["longest_context"]["fp8"], min(2**30 // 4096, plan["max_positions"]))

    def test_users_get_an_answer(self):
        asked = ("--gpu-memory", "2G", "--weights", "1G", "--context", "8K", "--users", 20)
        plan = self.plan(BUNDLE, *asked)
        room = 0.9 * 2**31 - 2**30
        self.assertEqual(plan["cache_bytes"], room)
        for name, bytes_a_token in (("bf16", 8192), ("fp8", 4096)):
            answer = plan["users"][name]
            self.assertEqual(answer["requests"], room // (bytes_a_token * 8192))
            self.assertEqual(answer["fits"], 20 <= answer["requests"])
        self.assertTrue(plan["users"]["int2"]["fits"])
        text = self.run_ok("oscar-bundle", "plan", BUNDLE, *asked).stdout
        self.assertRegex(text, "20 requests at a time, of 8,192 tokens\nINT2 +fits: ")
        self.assertRegex(text, "BF16 +does not fit: .*\n +what would: 12 requests, or .* tokens each, or 2 GPUs")
        two = self.plan(BUNDLE, *asked, "--tp", 2)
        self.assertTrue(two["users"]["bf16"]["fits"])
        self.assertEqual(two["gpus"], 2)

    def test_text_fits_80_columns_and_holds_every_table(self):
        text = self.run_ok("oscar-bundle", "plan", "tiny-gqa", "--gpu-memory", "80G").stdout
        self.assertLessEqual(max(map(len, text.splitlines())), 80, text)
        for words in ("One request, GiB", "Requests that fit", "longest context", "with other settings"):
            self.assertIn(words, text)
        self.assertNotIn("Requests that fit", self.run_ok("oscar-bundle", "plan", BUNDLE).stdout)

    def test_what_cannot_be_planned_is_refused(self):
        self.refuse("oscar-bundle", ["plan", "tiny-gqa", "--gpu-memory", "1M"], "weights alone")
        self.refuse("oscar-bundle", ["plan", "tiny-gqa", "--gpu-memory", "much"], "--gpu-memory",
                    code=2)
        for size, meant in (("80", "80G"), ("0.5", ""), ("1.5", "1.5G"), ("40960", "40960M")):
            self.refuse("oscar-bundle", ["plan", "tiny-gqa", "--gpu-memory", size], "--gpu-memory",
                        f"did you mean {meant}?" if meant else "malformed", code=2)
        self.refuse("oscar-bundle", ["plan", "tiny-gqa", "--weights", "16"], "--weights", "16G?", code=2)
        self.run_ok("oscar-bundle", "plan", "tiny-gqa", "--gpu-memory", 80 << 30)
        for option in ("--users", "--tp", "--utilization"):
            self.refuse("oscar-bundle", ["plan", "tiny-gqa", option, 1], "--gpu-memory", code=2)
        self.refuse("oscar-bundle", ["plan", BUNDLE, "--gpu-memory", "2G", "--users", 2], "--weights")
        self.refuse("oscar-bundle", ["plan", BUNDLE, "--gpu-memory", "2G", "--tp", 3], "2 KV heads")
        self.refuse("oscar-bundle", ["plan", self.folder / "absent"], "absent")
        self.refuse("oscar-bundle", ["plan", SOURCE / "README.md"], "README.md")
        self.refuse("oscar-bundle", ["plan", "tiny-gqa", "--context", 0], "--context", code=2)


if __name__ == "__main__":
    unittest.main()
