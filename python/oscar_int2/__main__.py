"""python -m oscar_int2 COMMAND"""
import importlib
import signal
import sys

# Command, the module whose main() it is, and what it does. Modules are imported when they are called:
# most commands need neither torch nor the library.
COMMANDS = {
    "answers": (".commands.answers", "twenty turns of one chat, over BF16 and over the 2-bit cache"),
    "calibrate": (".commands.calibrate", "a bundle of any model that transformers runs"),
    "check": (".commands.check", "whether vLLM would serve a model over a bundle, before it starts"),
    "dequantize": (".commands.dequantize", "a GGUF file as a Hugging Face folder, for vLLM and transformers"),
    "doctor": (".doctor", "what this machine and this build can serve"),
    "evaluate": (".commands.evaluate", "KL and perplexity of such a model over its bundle"),
    "fetch": (".commands.fetch", "a real model, smollm2 or qwen2.5-coder-1.5b, or corpora: real text"),
    "lm-eval": (".commands.lm_eval", "tasks of lm-eval over the 2-bit cache: its command, with the model oscar_int2"),
    "prepare-corpus": (".commands.prepare_corpus", "token ids of a corpus, by transformers and its chat template"),
    "publish": (".commands.publish", "one folder of a bundle, to hand on or to upload"),
    "render": (".commands.render", "documents of a text file by a chat template, for the programs"),
    "zoo": (".commands.published", "the index over a folder of published bundles"),
}


def usage():
    lines = ["usage: python -m oscar_int2 COMMAND ...", ""]
    lines += [f"  {name:16}{about}" for name, (_, about) in COMMANDS.items()]
    return "\n".join([*lines, "", "python -m oscar_int2 COMMAND --help says more."])


def main(words):
    if words[:1] in (["-h"], ["--help"]):
        print(usage())
        return 0
    if not words or words[0] not in COMMANDS:
        print(usage(), file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that scratch folders are removed
    module = importlib.import_module(COMMANDS[words[0]][0], __package__)
    try:
        return module.main(words[1:])
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
