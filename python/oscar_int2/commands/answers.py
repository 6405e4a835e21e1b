"""Twenty turns of one chat, each answered over BF16 and over the 2-bit cache, as Markdown.

Both answer the same chat: the turns so far with BF16's answers. Greedy, nothing is selected or cut
but at --tokens. `same` counts answers that are equal to the last token; two runs in BF16 that add
in another order do not always agree either.

    python -m oscar_int2 answers MODEL BUNDLE OUT.md [--json OUT.json] [--tokens 160]

OUT.json is what --answers of oscar-bundle report and card shows: schema "oscar-answers-1", the bundle's
content_sha256, the device, and each turn with both answers.
"""
import argparse
import json

QUESTIONS = (
    "What is a computer network?",
    "How does TCP make sure that data arrives?",
    "What is the difference between TCP and UDP?",
    "Name three uses of UDP.",
    "What is an IP address?",
    "What does DNS do?",
    "Explain HTTP in two sentences.",
    "What is encryption?",
    "How does public key cryptography work?",
    "What is a firewall?",
    "What is a database?",
    "What is an index in a database good for?",
    "What is a compiler?",
    "Name two programming languages and what they are used for.",
    "What is a hash table?",
    "What is recursion? Give a small example.",
    "What is version control?",
    "What is a unit test?",
    "What is an operating system?",
    "Summarise what we talked about.",
)


def prompt_of(tokenizer, chat):
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def answers(tokenizer, generators, tokens, questions):
    """For each question its text, the tokens before its answers, and {name: (ids, text)}."""
    chat, rows = [], []
    for question in questions:
        chat.append({"role": "user", "content": question})
        prompt = prompt_of(tokenizer, chat)
        given = {}
        for name, generator in generators.items():
            ids = generator.generate([prompt], tokens, stop=[tokenizer.eos_token_id])[0]
            given[name] = ids, tokenizer.decode(ids, skip_special_tokens=True).strip()
        rows.append((question, len(prompt), given))
        chat.append({"role": "assistant", "content": given["BF16"][1]})
    return rows


def quoted(text):
    return "\n".join(f"> {line}".rstrip() for line in text.splitlines() or [""])


def markdown(title, rows, window):
    same = sum(given["BF16"][0] == given["INT2"][0] for _, _, given in rows)
    lines = [f"# {title}", "",
             f"{len(rows)} turns of one chat, unselected, by `python -m oscar_int2 answers`; {same} answers are "
             f"the same to the last token. Rows beyond {window} tokens are in 2 bits."]
    for number, (question, before, given) in enumerate(rows, 1):
        lines += ["", f"## {number}. {question}", "", f"{before} tokens before the answer."]
        for name, (_, text) in given.items():
            lines += ["", f"{name}:", "", quoted(text)]
    return "\n".join(lines) + "\n"


def as_json(rows, bundle, window, tokens, device):
    turns = [{"question": question, "tokens_before": before, "bf16": given["BF16"][1], "int2": given["INT2"][1],
              "same": given["BF16"][0] == given["INT2"][0]} for question, before, given in rows]
    return json.dumps({"schema": "oscar-answers-1", "bundle_serving_sha256": bundle.serving_sha256,
                       "device": device, "most_tokens": tokens, "exact_tokens": window, "turns": turns},
                      indent=1, ensure_ascii=False) + "\n"


def main(words):
    parser = argparse.ArgumentParser(prog="python -m oscar_int2 answers", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hugging Face folder with a chat template")
    parser.add_argument("bundle")
    parser.add_argument("out", help="Markdown")
    parser.add_argument("--json", help="the same for oscar-bundle report and card")
    parser.add_argument("--tokens", type=int, default=160, help="of an answer at most, default 160")
    parser.add_argument("--title", default="Answers over BF16 and over the 2-bit cache")
    parser.add_argument("--turns", type=int, default=len(QUESTIONS), help="default all")
    parser.add_argument("--device", help="default cuda where there is a GPU, else cpu")
    arguments = parser.parse_args(words)

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ..bundle import load
    from ..generator import Generator
    arguments.device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    if tokenizer.chat_template is None:
        parser.error(f"{arguments.model} has no chat template")
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16)
    model = model.to(arguments.device).eval()
    bundle = load(arguments.bundle)
    room = (arguments.tokens + 64) * (arguments.turns + 1)
    generators = {"BF16": Generator(model, None, max_tokens=room),
                  "INT2": Generator(model, bundle, max_tokens=room)}
    rows = answers(tokenizer, generators, arguments.tokens, QUESTIONS[:arguments.turns])
    window = bundle.quantizer.sink_tokens + bundle.quantizer.recent_tokens
    with open(arguments.out, "w", encoding="utf-8") as file:
        file.write(markdown(arguments.title, rows, window))
    if arguments.json:
        device = torch.cuda.get_device_name(arguments.device) if "cuda" in arguments.device else arguments.device
        with open(arguments.json, "w", encoding="utf-8") as file:
            file.write(as_json(rows, bundle, window, arguments.tokens, device))
    return 0
