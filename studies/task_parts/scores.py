"""Scores of answers, paired differences with their intervals, and their tables."""
import concurrent.futures
import math
import pathlib

import numpy as np

from . import engine, files, sessions
from .plan import SCORERS, default_plan

SCHEMA = "oscar-tasks-1"
REPLICATES, SEED = 2000, 20261127
BASE = "bf16"
SIDE_BY_SIDE = 2
LOOP_REPEATS, LOOP_CHARACTERS = 4, 120
ALL = "all"


def loop_of(text: str) -> int:
    """Characters of the period that is repeated to the end of a text, 4 times and over 120 characters at least; 0 without one."""
    text = text.rstrip()
    for period in range(1, len(text) // LOOP_REPEATS + 1):
        span = max(LOOP_REPEATS * period, LOOP_CHARACTERS)
        if span <= len(text) and text[-1] == text[-1 - period] and text[-span:-period] == text[-span + period:]:
            return period
    return 0


def score_answers(prompts: list, answers: dict, said=lambda words: None) -> dict:
    """{key: {id: outcome}} of answers {key: {id: answer}}. Equal answers to a prompt are scored once."""
    by_id = {prompt["id"]: prompt for prompt in prompts}
    wanted = sorted({(name, answer["text"]) for given in answers.values() for name, answer in given.items()})
    said(f"{len(wanted)} different answers")

    def score(item):
        prompt = by_id[item[0]]
        return SCORERS[prompt["score"]](item[1], prompt["expected"])

    with concurrent.futures.ThreadPoolExecutor(SIDE_BY_SIDE) as workers:
        scores = dict(zip(wanted, workers.map(score, wanted)))
    return {key: {name: _outcome(by_id[name], answer, scores[name, answer["text"]]) for name, answer in given.items()}
            for key, given in answers.items()}


def _outcome(prompt: dict, answer: dict, score: float) -> dict:
    cut = answer["finish"] != "stop"
    outcome = {"score": score, "tokens": answer["tokens"], "cut": cut, "loop": cut and loop_of(answer["text"]) > 0}
    if prompt["task"] == "agents":
        outcome["valid"] = sessions.is_valid(answer["text"])
    return outcome


def mean_of(outcomes: list) -> dict:
    """One outcome of several samples of a prompt; right is what is right every time."""
    merged = {key: sum(outcome[key] for outcome in outcomes) / len(outcomes) for key in outcomes[0]}
    return merged | {"right": all(outcome["score"] >= 1 for outcome in outcomes)}


def paired(differences: list, units: list) -> tuple:
    """(mean, low, high): 95% interval by drawing whole units, since prompts of one problem or one session are no independent ones."""
    names = {unit: i for i, unit in enumerate(dict.fromkeys(units))}
    places = np.array([names[unit] for unit in units])
    sums = np.bincount(places, differences, len(names))
    counts = np.bincount(places, minlength=len(names))
    mean = float(sums.sum() / counts.sum())
    if len(names) < 2:
        return mean, None, None
    draws = np.random.default_rng(SEED).multinomial(len(names), np.full(len(names), 1 / len(names)), REPLICATES)
    means = (draws @ sums) / (draws @ counts)
    return mean, float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))


def mcnemar(lost: int, won: int) -> float:
    """Exact two-sided p of `lost` against `won` if both were equally likely."""
    n, k = lost + won, min(lost, won)
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2 ** n)


def read_answers(paths: list, prompts_sha256: str) -> tuple:
    """({(mode, cache): [{id: answer} of each seed]}, records). Files of one cache and seed are parts of one."""
    merged, records = {}, []
    for path in paths:
        record, *answers = files.read_lines(path)
        if record.get("schema") != engine.SCHEMA:
            raise engine.Failed(f"{path}: expected {engine.SCHEMA}, found {record.get('schema')}")
        if record["prompts_sha256"] != prompts_sha256:
            raise engine.Failed(f"{path}: these are answers to other prompts")
        mode = "greedy" if record["sampled"] is None else "sampled"
        into = merged.setdefault((mode, record["cache"], record["sampled"]), {})
        twice = into.keys() & {answer["id"] for answer in answers}
        if twice:
            raise engine.Failed(f"{path}: {len(twice)} prompts are answered in another file too, {min(twice)} for one")
        into |= {answer["id"]: answer for answer in answers}
        records.append(record)
    return merged, records


def figures(prompts: list, scored: dict) -> dict:
    """{mode: {row: {cache: figures}}} of {(mode, cache, seed): {id: outcome}}."""
    document = {}
    for mode in sorted({key[0] for key in scored}):
        samples = {}
        for (of, cache, _), outcomes in scored.items():
            if of == mode:
                for name, outcome in outcomes.items():
                    samples.setdefault(cache, {}).setdefault(name, []).append(outcome)
        caches = {cache: {name: mean_of(outcomes) for name, outcomes in by_id.items()} for cache, by_id in samples.items()}
        rows = {}
        for prompt in prompts:
            for row in dict.fromkeys((prompt["kind"], f"{ALL} {prompt['task']}", ALL)):
                rows.setdefault(row, []).append(prompt)
        for task in {prompt["task"] for prompt in prompts}:
            if len({prompt["kind"] for prompt in prompts if prompt["task"] == task}) == 1:
                del rows[f"{ALL} {task}"]  # the sum of one kind
        document[mode] = {row: {cache: _figures(those, caches[cache], caches.get(BASE)) for cache in _in_order(caches)}
                          for row, those in sorted(rows.items(), key=lambda item: _place(item[0], prompts))
                          if any(p["id"] in given for given in caches.values() for p in those)}
    return document


def _in_order(caches) -> list:
    return sorted(caches, key=list(engine.CACHES).index)


def _place(row: str, prompts: list) -> tuple:
    """Kinds by task, the sum of a task behind its kinds, the sum of all at the end."""
    if row == ALL:
        return (1,)
    tasks = list(dict.fromkeys(kind.task for kind in default_plan()))
    if row.startswith(f"{ALL} "):
        return (0, tasks.index(row[len(ALL) + 1:]), 1, 0, "")
    prompt = next(p for p in prompts if p["kind"] == row)
    return (0, tasks.index(prompt["task"]), 0, len(row.split(",")[0]), row.split(",")[0], prompt["tokens"])


def _figures(prompts: list, outcomes: dict, base) -> dict:
    given = [outcomes[p["id"]] for p in prompts if p["id"] in outcomes]
    if not given:
        return {"prompts": 0}
    result = {"prompts": len(given), "score": _mean(o["score"] for o in given), "tokens": _mean(o["tokens"] for o in given),
              "cut": _mean(o["cut"] for o in given), "loops": _mean(o["loop"] for o in given)}
    valid = [o["valid"] for o in given if "valid" in o]
    if len(valid) == len(given):
        result["valid"] = _mean(valid)
    both = [p for p in prompts if base and p["id"] in outcomes and p["id"] in base]
    if base is not outcomes and both:
        pairs = [(outcomes[p["id"]], base[p["id"]]) for p in both]
        result["pairs"] = len(pairs)
        result["difference"] = paired([a["score"] - b["score"] for a, b in pairs], [p["unit"] for p in both])
        result["lost"] = sum(b["right"] and not a["right"] for a, b in pairs)
        result["won"] = sum(a["right"] and not b["right"] for a, b in pairs)
        result["p"] = mcnemar(result["lost"], result["won"])
    return result


def _mean(values) -> float:
    values = list(values)
    return float(sum(values) / len(values))


def _share(value) -> str:
    return f"{100 * value:.1f}"


def _difference(values) -> str:
    mean, low, high = (None if value is None else f"{100 * value:+.1f}" for value in values)
    return mean if low is None else f"{mean} [{low}, {high}]"


def _table(columns: list, rows: list) -> list:
    return ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns), *("| " + " | ".join(row) + " |" for row in rows), ""]


def render(document: dict) -> str:
    """README.md of the scores."""
    lines = ["# Tasks in a server", "", f"{document['prompts']:,} prompts, made by `studies/tasks.py prompts`, answered by vLLM over "
             "several KV caches. Scores are in percent. Differences are paired with BF16's; [ ] is a 95% interval (bootstrap over "
             f"problems, prompts and sessions, {REPLICATES} draws, seed {SEED}).", ""]
    for mode, rows in document["figures"].items():
        caches = list(dict.fromkeys(cache for row in rows.values() for cache in row))
        others = [cache for cache in caches if any("difference" in row.get(cache, {}) for row in rows.values())]
        lines += [f"## {mode.capitalize()}", ""]
        most = {name: max(row[cache]["prompts"] for cache in caches) for name, row in rows.items()}
        lines += _table(["task", "prompts", *caches, *(f"{cache} - {BASE}" for cache in others)],
                        [[_title(name), f"{most[name]:,}", *(_score(row[cache], most[name]) for cache in caches),
                          *(_cell(row[cache], "difference", _difference) for cache in others)] for name, row in rows.items()])
        lines += ["Answers: mean tokens, share that was cut off (%), and share that ends in a loop (%). A loop is a period that an "
                  "answer cut off repeats to its end.", ""]
        lines += _table(["task", *(f"{cache}: tokens, cut, loops" for cache in caches)],
                        [[_title(name), *(f"{row[cache]['tokens']:.0f}, {_share(row[cache]['cut'])}, {_share(row[cache]['loops'])}"
                                          if row[cache]["prompts"] else "" for cache in caches)] for name, row in rows.items()])
        if others:
            lines += [f"Prompts that only {BASE} answered wholly right, those that only the other cache did, and McNemar's exact p (which "
                      "takes prompts as independent).", ""]
            lines += _table(["task", *others], [[_title(name), *(_discordant(row[cache]) for cache in others)]
                                                for name, row in rows.items()])
        valid = [[_title(name), *(_cell(row[cache], "valid", _share) for cache in caches)] for name, row in rows.items()
                 if any("valid" in figures for figures in row.values())]
        if valid:
            lines += ["Tool calls that were valid (%), right or not:", "", *_table(["task", *caches], valid)]
    lines += ["## Runs", ""]
    lines += _table(["cache", "seed", "part", "model", "device", "vLLM", "tokens held", "answers", "of", "seconds"],
                    [[r["cache"] + (f" ({r['scales']})" if r.get("scales") else ""),
                      "greedy" if r["sampled"] is None else str(r["sampled"]), r["part"], r["model"], r["device"], r["vllm"],
                      f"{r['kv_tokens']:,}", f"{r['answered']:,}", f"{r['asked']:,}",
                      f"{r['seconds']:.0f}"]
                     for r in document["runs"]])
    lines += [f"- {r['cache']}: `{line}`" for r in document["runs"] for line in r["proof"] if "is on" in line or "self-check" in line]
    return "\n".join(lines).rstrip() + "\n"


def _title(row: str) -> str:
    return f"**{row}**" if row == ALL or row.startswith(f"{ALL} ") else row


def _discordant(figures_of_cache: dict) -> str:
    if "lost" not in figures_of_cache:
        return ""
    return f"{figures_of_cache['lost']} / {figures_of_cache['won']}, p = {figures_of_cache['p']:.2g}"


def _score(figures_of_cache: dict, most: int) -> str:
    """In percent, and of how many prompts where another cache answered more."""
    fewer = "" if figures_of_cache["prompts"] == most else f" of {figures_of_cache['prompts']:,}"
    return _cell(figures_of_cache, "score", lambda share: _share(share) + fewer)


def _cell(figures_of_cache: dict, key: str, text) -> str:
    return text(figures_of_cache[key]) if key in figures_of_cache else ""


def score(prompts_file: pathlib.Path, paths: list, said=lambda words: None) -> dict:
    """tasks.json: figures, runs, and the outcome of every answer."""
    prompts = files.read_lines(prompts_file)
    digest = files.sha256_of_lines(prompts_file)
    answers, runs = read_answers(paths, digest)
    scored = score_answers(prompts, answers, said)
    return {"schema": SCHEMA, "prompts": len(prompts), "prompts_sha256": digest, "figures": figures(prompts, scored), "runs": runs,
            "scores": {"/".join(str(word) for word in key if word is not None):
                       {name: outcome["score"] for name, outcome in outcomes.items()} for key, outcomes in scored.items()}}
