#!/usr/bin/env python3
"""What calibration text that asks for facts far back does to needles and quotes: texts and the commands that measure.

  recall.py OUT --tokenizer FOLDER        OUT/*.npy, of `python -m oscar_int2 fetch corpora`

262,144 tokens each of code and documentation, in rows of 4,096 or 16,384 tokens (NAME4, NAME16):

  base     as they are
  tails    the last quarter of each row repeats stretches of 24 to 96 tokens of the row, from anywhere in it
  chats    the user's message has records of several forms between its lines; questions about them, and lines to quote,
           fill the last quarter
  half     every second row is as chats, or with `tails` in its name as tails

What `oscar-calibrate --recall` does was chosen among these, in rows of 4,096 tokens:

  tails-SHARE-A-B    the last SHARE percent of each row repeats stretches of A to B tokens; `-second`: of every second row
  records-SHARE      strings of the row's own tokens in any order stand in it, behind 8 of its tokens; the last part
                     repeats both

`tune-plain`, `tune-tails`, `tune-chats` and `tune-pairs` are of other documents, in rows of 8,192 tokens: texts to choose
by. In the last of them keys and values in hexadecimal digits stand between the lines, and sentences at the end name the
values of some. Records have other forms than the needles of studies/tasks.py, and other words. With M for the model's
folder:

  oscar-calibrate M OUT/chats16.npy chats16.h5 --separators on --sequence-length 16384
  oscar-eval M --bundle chats16=chats16.h5 --corpus OUT/tune-chats.npy --compare exact,chats16 --tasks ppl \\
    --sequence-length 8192 --first-position 6400 --separators off  # 320 plain, 7168 tails, 7200 pairs
  studies/tasks.py answer PROMPTS M OUT --cache int2 --bundle chats16.h5 --only needles,quotes
"""
import argparse
import json
import pathlib
import random

import numpy as np

TOKENS, ROWS = 262_144, (4096, 16384)
TUNE_ROWS, TUNE_LENGTH = 16, 8192
TAILS = [(25, 6, 24), (12.5, 24, 96), (50, 24, 96), (25, 24, 96, "second"), (25, 6, 24, "second"),
         (50, 24, 96, "second"), (50, 6, 24, "second")]  # percent of a row, tokens of a stretch
SYSTEM = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
TURN, END = "<|im_start|>user\n{}<|im_end|>\n", "<|im_start|>assistant\n{}<|im_end|>\n"
NAMES = ("Moretti Okafor Lindqvist Tanaka Farrow Delgado Petrov Haddad Nguyen Castillo Brandt Mwangi Kowalski Ferreira Novak "
         "Osei Larsen Chandra Weiss Abbott Sato Romero Keller Byrne").split()
FIRMS = ("Northgate Bluefin Halcyon Redwood Summit Orchid Lantern Granite Harbor Falcon Cobalt Juniper Meridian Willow Cascade "
         "Ember").split()
MONTHS = "January February March April May June July August September October November December".split()


class Texts:
    """Documents of code and documentation by turns, as one stream of ids."""

    def __init__(self, corpora, tokenizer):
        self.corpora, self.tokenizer = corpora, tokenizer
        self.end = tokenizer.convert_tokens_to_ids("<|endoftext|>")

    def stream(self, part, seed, tokens):
        kinds = [self._documents(kind, part, seed) for kind in ("code", "documentation")]
        ids = []
        for number in range(max(map(len, kinds))):
            for kind in kinds:
                for text in kind[number:number + 1]:
                    ids += [*self.ids(text[:200_000]), self.end]
            if len(ids) >= tokens:
                return np.array(ids[:tokens], np.int32)
        raise SystemExit(f"recall: {part} has {len(ids)} tokens, fewer than {tokens}")

    def _documents(self, kind, part, seed):
        lines = (self.corpora / f"{kind}-{part}.jsonl").read_text().splitlines()
        texts = [json.loads(line)["text"] for line in lines]
        random.Random(seed).shuffle(texts)
        return texts

    def ids(self, text):
        return self.tokenizer(text)["input_ids"]


def with_tails(rows, numbers, share=0.25, shortest=24, longest=96, second=False):
    """Rows [n, L], of which the last part repeats what stands before it; with `second` in every second row."""
    cut = rows.shape[1] - int(rows.shape[1] * share)
    made = rows.copy()
    for row in made[1::2] if second else made:
        tail = []
        while len(tail) < len(row) - cut:
            length = numbers.randrange(shortest, longest + 1)
            first = numbers.randrange(0, cut - length)
            tail += row[first:first + length].tolist()
        row[cut:] = tail[:len(row) - cut]
    return made


def with_records(rows, numbers, share=0.25, second=False):
    """Rows [n, L] with strings of their own tokens behind 8 others, of which the last part repeats both."""
    made, length = rows.copy(), rows.shape[1]
    cut = length - int(length * share)
    for row in made[1::2] if second else made:
        body, pieces, new, last = row[:cut].tolist(), [], [], 0
        for at in sorted(numbers.sample(range(16, cut - 16, 16), length // 128)):
            string = [numbers.choice(body) for _ in range(numbers.randrange(4, 13))]
            pieces.append(body[at - 8:at] + string)
            new += body[last:at] + string
            last = at
        tail = []
        while len(tail) < length - cut:
            tail += numbers.choice(pieces)
        row[:] = (new + body[last:])[:cut] + tail[:length - cut]
    return made


def as_pairs(rows, texts, numbers, keys=48):
    """Rows [n, L] with keys and values between their lines, and sentences at the end that name values."""
    made, length = [], rows.shape[1]
    for row in rows:
        names = [f"{numbers.getrandbits(32):08x}-{numbers.getrandbits(16):04x}" for _ in range(keys)]
        values = [f"{numbers.getrandbits(48):012x}" for _ in range(keys)]
        lines = texts.tokenizer.decode(row[:length * 375 // 512]).split("\n")
        for name, value in zip(names, values):
            lines.insert(numbers.randrange(0, len(lines) + 1), f'    "{name}": "{value}",')
        ids = texts.ids("\n".join(lines))[:length * 225 // 256]
        text = texts.tokenizer.decode(ids)
        held = [(name, value) for name, value in zip(names, values) if value in text]
        while len(ids) < length:
            ids += texts.ids("\nThe value of {} is {}.".format(*numbers.choice(held)))
        made.append(ids[:length])
    return np.array(made, np.int32)


def record(numbers, used):
    """(a line, [(a question about it, the answer)])"""
    while (number := str(numbers.randrange(10000, 99999))) in used:
        pass
    used.add(number)
    kind = numbers.randrange(4)
    who, firm = numbers.choice(NAMES), numbers.choice(FIRMS)
    day, amount = f"{numbers.randrange(1, 29)} {numbers.choice(MONTHS)}", f"{numbers.randrange(100, 9999)}.{numbers.randrange(10, 99)}"
    if kind == 0:
        return (f"Invoice {number} from {firm} over {amount} EUR was paid on {day}.",
                [(f"When was invoice {number} paid?", day), (f"Which company sent invoice {number}?", firm),
                 (f"How much was invoice {number}?", f"{amount} EUR")])
    if kind == 1:
        return (f"- ticket {number}: opened by {who}, priority {numbers.randrange(1, 6)}, room {firm[0]}{numbers.randrange(100, 999)}",
                [(f"Who opened ticket {number}?", who)])
    if kind == 2:
        checksum = f"{numbers.getrandbits(40):010x}"
        return (f'{{"id": {number}, "owner": "{who}", "checksum": "{checksum}"}}',
                [(f"What is the checksum of the object with id {number}?", checksum), (f"Who owns the object with id {number}?", who)])
    return (f"| {number} | {firm} | {who} | {amount} |",
            [(f"In the table, what amount stands in row {number}?", amount), (f"Which company is in row {number}?", firm)])


def as_chats(rows, texts, numbers):
    """Rows [n, L] of one chat each: a message with records in it, then questions and answers."""
    made, length = [], rows.shape[1]
    for row in rows:
        lines, used, asked = texts.tokenizer.decode(row[:int(length * 0.70)]).split("\n"), set(), []
        for _ in range(max(8, length // 160)):
            line, questions = record(numbers, used)
            asked += questions
            lines.insert(numbers.randrange(0, len(lines) + 1), line)
        quoted = [line for line in lines if 30 < len(line) < 200]
        for line in numbers.sample(quoted, min(len(quoted), max(6, length // 400))):
            words = line.split()
            if len(words) >= 6:
                asked.append((f"Quote the line that contains: {' '.join(words[:3])}", line))
        numbers.shuffle(asked)
        ids, count = texts.ids(SYSTEM + "\n".join(lines) + "\n\n")[:int(length * 0.78)], 0
        while len(ids) < length:
            question, answer = asked[count % len(asked)]
            turn = TURN.format(question) if count else question + "<|im_end|>\n"
            ids += texts.ids(turn + END.format(answer))
            count += 1
        made.append(ids[:length])
    return np.array(made, np.int32)


def every_second(rows, others):
    made = rows.copy()
    made[1::2] = others[1::2]
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--tokenizer", required=True, help="the model's folder")
    parser.add_argument("--corpora", type=pathlib.Path, default="corpora", help="(corpora)")
    arguments = parser.parse_args()
    from transformers import AutoTokenizer

    texts = Texts(arguments.corpora, AutoTokenizer.from_pretrained(arguments.tokenizer))
    stream, made = texts.stream("calibration", 5, TOKENS), {}
    for length in ROWS:
        rows, name = stream.reshape(-1, length), length // 1024
        tails, chats = with_tails(rows, random.Random(1)), as_chats(rows, texts, random.Random(2))
        made |= {f"base{name}": rows, f"tails{name}": tails, f"chats{name}": chats,
                 f"half-tails{name}": every_second(rows, tails), f"half{name}": every_second(rows, chats)}
    rows = stream.reshape(-1, ROWS[0])
    for share, shortest, longest, *second in TAILS:
        name = "-".join(["tails", f"{share:g}", str(shortest), str(longest), *second])
        made[name] = with_tails(rows, random.Random(1), share / 100, shortest, longest, bool(second))
    made |= {"records-25": with_records(rows, random.Random(1)), "records-25-second": with_records(rows, random.Random(1), second=True)}
    stream = texts.stream("tune", 9, 2 * TUNE_ROWS * TUNE_LENGTH)
    first, second = stream.reshape(2, TUNE_ROWS, TUNE_LENGTH)
    made |= {"tune-plain": first, "tune-tails": with_tails(first, random.Random(11), 0.125),
             "tune-chats": as_chats(second, texts, random.Random(12)), "tune-pairs": as_pairs(first, texts, random.Random(21))}
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, rows in made.items():
        np.save(arguments.out / f"{name}.npy", rows)
        print(f"wrote {arguments.out / name}.npy: {rows.shape[0]} rows of {rows.shape[1]} tokens")


if __name__ == "__main__":
    main()
