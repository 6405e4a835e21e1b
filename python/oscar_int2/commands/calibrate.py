"""A bundle of a model that transformers runs, whatever its family: docs/models.md has a table.

The model runs in transformers, layer by layer. Statistics, and rows of held-back text for the search, go to
`oscar-calibrate`, whose options of the fit may follow behind --.
"""
import argparse
import pathlib
import re
import sys

from ..errors import OscarError


def main(words):
    words, fit_options = (words[:words.index("--")], words[words.index("--") + 1:]) if "--" in words else (words, [])
    parser = argparse.ArgumentParser(prog="python -m oscar_int2 calibrate", allow_abbrev=False, description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="checkpoint folder, or a name of the Hub that was fetched")
    parser.add_argument("corpus", help="token ids (.npy, .h5) or text (.txt, .jsonl, a folder), several joined by commas")
    parser.add_argument("out", type=pathlib.Path, help="bundle to write")
    parser.add_argument("--search", choices=("on", "off"), default="on",
                        help="let held-back text decide clipping (on); its rows lie beside OUT until that is done")
    parser.add_argument("--recall", choices=("auto", "on", "off"), default="auto",
                        help="let the second half of every second sequence repeat stretches of its first, so that queries "
                        "look far back; auto: in text, not in ids, of sequences that are at least four times as long as the "
                        "exact windows")
    parser.add_argument("--statistics-only", action="store_true", help="write the sums alone, for oscar-bundle merge or fit")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    add_run_options(parser)
    arguments = parser.parse_args(words)
    try:
        from ..calibration import calibrate
        calibrate(arguments.model, arguments.corpus, arguments.out, search=arguments.search, recall=arguments.recall,
                  statistics_only=arguments.statistics_only, fit_options=fit_options, force=arguments.force, progress=progress,
                  **run_options(arguments))
    except (OscarError, OSError, ValueError) as error:
        return failed(error)
    print(f"{_line()}{arguments.out}: {'statistics' if arguments.statistics_only else 'bundle'} of {arguments.model}",
          file=sys.stderr)
    return 0


def _line():
    """What begins a line of standard error anew, where progress() wrote one."""
    return "\r\x1b[K" if sys.stderr.isatty() else ""


def progress(layer, layers):
    """A line of a terminal that counts layers; in a file, none."""
    if sys.stderr.isatty():
        print(f"{_line()}layer {layer + 1} of {layers}", end="" if layer + 1 < layers else "\n", file=sys.stderr, flush=True)


def failed(error):
    words = str(error).replace("trust_remote_code=True", "--trust-remote-code").replace("force=True", "--force")
    words = re.sub(r"\bsequence_length=(\d+)", r"--sequence-length \1", words)
    print(f"{_line()}error: {words}", file=sys.stderr)
    return 1


def add_run_options(parser):
    """Those that every run of a model in transformers has."""
    parser.add_argument("--sequence-length", type=int, metavar="N",
                        help="tokens of a sequence; default: the model's context, 4096 at most")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="use less than the corpus has")
    parser.add_argument("--batch-tokens", type=int, default=8192, metavar="N",
                        help="tokens that a layer sees at a time (8192)")
    parser.add_argument("--device", help="where layers run, one at a time; a GPU if there is one")
    parser.add_argument("--dtype", help="of the run: bfloat16, float32, ...; as stored on a GPU, float32 on a CPU")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the checkpoint")


def run_options(arguments):
    """What add_run_options() read, as calibrate() and evaluate() take it."""
    import torch
    dtype = getattr(torch, arguments.dtype, None) if arguments.dtype else None
    if arguments.dtype and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"--dtype is {arguments.dtype!r}, expected bfloat16, float16 or float32")
    for name in ("sequence_length", "max_tokens", "batch_tokens"):
        value = getattr(arguments, name)
        if value is not None and value < 2:
            raise ValueError(f"--{name.replace('_', '-')} is {value}, expected 2 or more")
    return {name: getattr(arguments, name) for name in (
        "sequence_length", "max_tokens", "batch_tokens", "device", "trust_remote_code")} | {"dtype": dtype}
