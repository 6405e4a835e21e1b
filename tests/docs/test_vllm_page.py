"""What docs/vllm.md says was measured and is refused is what the results hold and the plugin refuses."""
import ast
import csv
import re
import unittest

from support.markdown_files import headed_tables, section, table_rows, tables
from support.programs import SOURCE

PAGE = "docs/vllm.md"
# What the plugin calls a setting, as a pattern, where the page has other words for it than the plugin's first ones.
SAID = {
    "prefix caching without": "prefix caching .* without exact first tokens",
    "prefix caching with": "`VLLM_OSCAR_SINK_BYTES` too small",
    "--prefix-match-unit with": "windows or linear attention: .*`--prefix-match-unit`",
    "--disable-hybrid-kv-cache-manager with": "windows or linear attention: `--disable-hybrid-kv-cache-manager`",
    "--block-size": "other block sizes",
    "--dtype": "fp16 or fp32",
    ": this vLLM has no model": "models that vLLM 0.26 itself runs through transformers",
    "drafts by": r"\[drafts\]\(#drafts\) by other methods",
    "drafts whose number the device decides": "adaptive verification of drafts",
    "drafts for a model with linear attention": "of any kind for linear attention",
    "drafts by a model with windows or linear attention": "of a model with windows or linear attention",
    "LoRA adapters, which": r"LoRA adapters \|",
    "elastic expert parallelism": "elastic experts",
    "KV transfer by": "KV transfer: every connector but",
    "KV transfer in the role": "in the role `kv_both`",
    "KV offloading by": "other options than",
    "KV offloading with": "other options than",
    "KV offloading in this version": "KV offloading after 0.26",
    "KV offloading for a model with windows": "KV offloading after 0.26; with windows, linear attention",
    "KV offloading without prefix caching": "without prefix caching; other options",
    "KV offloading with drafts by": "drafts of a model; without prefix caching",
    "KV offloading with pipeline parallelism": "linear attention, pipeline parallel",
    "an encoder-decoder model": "encoder-decoder",
    "layers with a window that have none": "windows that the bundle does not know",
    "inputs other than text": "images and other inputs than text",
    "without chunked prefill": "`VLLM_OSCAR_CANONICAL_CHUNKS`.*without chunked prefill",
    "with linear attention": r"`VLLM_OSCAR_CANONICAL_CHUNKS`\]\(#prefix-caching\) with linear attention",
    "beside --long-prefill-token-threshold": "shorter `--long-prefill-token-threshold`",
    "with first tokens kept exactly": "shorter than the sink",
    "in steps of": "in steps without room",
    "in this version of vLLM": "comes in parts.*before 0.32",
    "beside drafts": "comes in parts.*with drafts or linear attention",
}


def results(name):
    with open(SOURCE / "benchmarks" / "results" / f"h200_{name}.csv", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def vllm_steps():
    """{(cache, requests, context): row} of the first runs, which the page's figures are of."""
    found = {}
    for row in results("vllm"):
        found.setdefault((row["kv"], row["requests"], row["context"]), row)
    return found


def number(text):
    return float(re.search(r"[\d,.]*\d", text)[0].replace(",", ""))


def refused():
    """What each refusal of settings.py and offloading.py names, as the words before the first value put in."""
    for name in ("settings", "offloading"):
        tree = ast.parse((SOURCE / "python" / "oscar_int2" / "vllm" / f"{name}.py").read_text(encoding="utf-8"))
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)
                     and node.name in ("check", "check_chunks", "check_streamed", "refused")]
        for node in (node for function in functions for node in ast.walk(function) if isinstance(node, ast.Tuple)):
            what = node.elts[0] if len(node.elts) in (2, 3) and not isinstance(node.elts[1], ast.Constant) else None
            if isinstance(what, ast.JoinedStr):
                texts = [part.value for part in what.values if isinstance(part, ast.Constant)]
                yield " ".join("".join(texts).split()) if texts[0].startswith("with ") else texts[0].strip(" =(")
            elif isinstance(what, ast.Constant) and isinstance(what.value, str):
                yield what.value


class VllmPage(unittest.TestCase):
    def assert_shown(self, shown, value):
        """`shown`, as "6.26 ms" or "5,451,840", is `value` rounded to the digits that it has."""
        digits = len(re.search(r"[\d,]*(?:\.(\d+))?", shown)[1] or "")
        self.assertEqual(number(shown), round(value, digits), shown)

    def assert_step(self, shown, row):
        """"34.79 ms (1,523 tokens/s)"."""
        self.assert_shown(shown, float(row["ms a step"]))
        if "(" in shown:
            self.assert_shown(shown.partition("(")[2], float(row["tokens/s"]))

    def test_every_refusal_of_the_plugin_is_in_its_table(self):
        table = section(PAGE, "What it refuses")
        shown = table + section(PAGE, "More")
        missed, used = [], set()
        for words in refused():
            key = next((key for key in sorted(SAID, key=len, reverse=True) if words.startswith(key)), None)
            used.add(key)
            if not re.search(SAID[key] if key else re.escape(words), shown if key == "KV transfer in the role" else table):
                missed.append(words)
        self.assertEqual(missed, [])
        self.assertEqual(SAID.keys() - used, set(), "what the plugin no longer refuses")

    def test_figures_are_those_that_were_measured(self):
        found = vllm_steps()
        rows = {row[0].split()[0]: row for row in table_rows(PAGE, "Figures")}
        self.assertEqual(set(rows), {"INT2", "FP8", "BF16"})
        for cache, (_, held, *steps) in rows.items():
            kv = cache.lower()
            self.assertEqual(number(held), float(found[kv, "1", "126000"]["tokens in the cache"]))
            self.assert_step(steps[0], found[kv, "1", "126000"])
            self.assert_step(steps[1], found[kv, "7", "100000"])
            if steps[2] != "7: as before":
                requests, step = steps[2].split(": ")
                self.assert_step(step, found[kv, requests, "100000"])

    def test_ratios_are_those_of_the_figures(self):
        found = vllm_steps()
        most = {"int2": "53", "fp8": "15", "bf16": "7"}
        rows = {row[0]: row[1:] for rows in tables(PAGE, "More") for row in rows if " over " in row[0]}
        self.assertEqual(len(rows), 2)
        for name, shown in rows.items():
            ours, theirs = name.lower().split(" over ")
            ms = [[float(found[kv, *point]["ms a step"]) for kv in (theirs, ours)] for point in (("1", "126000"), ("7", "100000"))]
            held = [float(found[kv, "1", "126000"]["tokens in the cache"]) for kv in (ours, theirs)]
            rate = [float(found[kv, most[kv], "100000"]["tokens/s"]) for kv in (ours, theirs)]
            for cell, (a, b) in zip(shown, (held, *ms, rate), strict=True):
                self.assert_shown(cell, a / b)

    def test_two_gpus(self):
        found = {(row["shape"], row["kv"], row["requests"], row["context"]): row for row in results("two_gpus")
                 if row["GPUs"] == "2" and row["layers"] != "16"}
        [rows] = [rows for rows in tables(PAGE, "Qwen3-32B on two GPUs") if rows[0][0] == "Qwen3-32B"]
        shape = None
        for name, cache, held, one, eight in rows:
            shape = name.lower() or shape
            row = found[shape, cache.lower(), "1", "126000"]
            self.assertEqual(number(held), float(row["tokens in the cache"]))
            self.assert_step(one, row)
            self.assert_step(eight, found[shape, cache.lower(), "8", "100000"])
        said = section(PAGE, "More")
        for shape, words in (("qwen3-32b", "is {} and {} times as fast as over BF16 with Qwen3-32B, {} and {} times as over FP8"),
                             ("qwen3-30b-a3b", "with Qwen3-30B-A3B {} and {}, {} and {}.")):
            ratios = [float(found[shape, kv, *point]["ms a step"]) / float(found[shape, "int2", *point]["ms a step"])
                      for kv in ("bf16", "fp8") for point in (("1", "126000"), ("8", "100000"))]
            self.assertIn(words.format(*(f"{ratio:.2f}" for ratio in ratios)), said)

    def test_agents(self):
        found = {(row["kv"], row["turn"]): row for row in results("agents") if row["sessions"] == "80"}
        rows = {row[0]: row[1:] for row in table_rows(PAGE, "Agents")}
        self.assertEqual(set(rows), {"INT2", "FP8", "BF16"})
        for cache, (held, hits, first, turn, rate) in rows.items():
            row = found[cache.lower(), "all"]
            self.assertEqual(number(held), float(row["tokens in the cache"]))
            self.assert_shown("0" + hits, float(row["hit rate"]))
            for shown, of in ((first, "first token"), (turn, "turn")):
                self.assert_shown(shown, float(row[f"{of} median s"]))
                self.assert_shown(shown.partition("(")[2], float(row[f"{of} worst s"]))
            self.assert_shown(rate, float(row["tokens/s"]))
        newer = {row["kv"]: row for row in results("agents_0_33") if row["turn"] == "all"}
        self.assertIn("Agents took {:.2f} s a turn in the median over INT2 and {:.1f} over FP8".format(
            *(float(newer[kv]["turn median s"]) for kv in ("int2", "fp8"))), section(PAGE, "More"))

    def test_drafts(self):
        found = {(row["kv"], row["requests"], row["drafts"]): row for row in results("drafts")}
        [rows] = [rows for headings, rows in headed_tables(PAGE, "More") if headings[1] == "1 request, k = 3"]
        for cache, *cells in rows:
            for cell, (requests, drafts) in zip(cells, (("1", "3"), ("1", "7"), ("8", "3"), ("8", "7")), strict=True):
                self.assert_shown(cell, float(found[cache.lower(), requests, drafts]["tokens/s"]))

    def test_another_vllm(self):
        found = {}
        for row in results("vllm_0_33"):
            found.setdefault((row["kv"], row["requests"]), []).append(float(row["ms a step"]))
        said = section(PAGE, "More")
        self.assertIn("1 x 126,000 took {:.2f} ms over INT2 and {:.2f} over BF16 ({:.2f} times), 7 x 100,000 {:.2f} and {:.2f} ({:.2f} times)".format(
            *(value for requests in "17" for ours, theirs in [(found["int2", requests][0], found["bf16", requests][0])]
              for value in (ours, theirs, theirs / ours))), said)
        ours, fp8 = ([found[kv, requests][-1] for requests in "17"] for kv in ("int2", "fp8"))
        self.assertIn("INT2 took {:.2f} and {:.2f}, FP8 {:.2f} and {:.2f} ({:.2f} and {:.2f} times), and 50 x 100,000 took {:.2f}".format(
            *ours, *fp8, *(b / a for a, b in zip(ours, fp8)), found["int2", "50"][0]), said)


if __name__ == "__main__":
    unittest.main()
