"""KL and perplexity over a bundle's 2-bit rows, of a model that transformers runs, whatever its family."""
import argparse
import json
import pathlib

from ..errors import OscarError
from .calibrate import add_run_options, failed, progress, run_options


def main(words):
    parser = argparse.ArgumentParser(prog="python -m oscar_int2 evaluate", allow_abbrev=False, description=__doc__)
    parser.add_argument("model", help="checkpoint folder, or a name of the Hub that was fetched")
    parser.add_argument("bundle", help="its bundle")
    parser.add_argument("corpus", help="held-out token ids (.npy, .h5) or text (.txt, .jsonl, a folder)")
    parser.add_argument("--first-position", type=int, metavar="N",
                        help="position of the first token that counts; default: the first that reads a 2-bit row")
    parser.add_argument("--weights", choices=("same", "any"), default="same",
                        help="any: take the bundle of other weights, such as those of the calibrated model before a fine-tune")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the figures to a file, too")
    add_run_options(parser)
    arguments = parser.parse_args(words)
    try:
        from ..calibration import evaluate
        found = evaluate(arguments.model, arguments.bundle, arguments.corpus, first_position=arguments.first_position,
                         weights=arguments.weights, progress=progress, **run_options(arguments))
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    except (OscarError, OSError, ValueError) as error:
        return failed(error)
    print(f"perplexity   {shown(found, 'perplexity', '.4f')} over exact rows\n"
          f"             {shown(found, 'int2_perplexity', '.4f')} over 2-bit rows\n"
          f"KL           {shown(found, 'kl', '.5f')} nats a token\n"
          f"top-1        {found['top1']:.1%} the same\n"
          f"{found['tokens']} tokens from position {found['first_position']} on; {errors_of(found)}")
    if not found["overlap"]["known"]:
        print("the bundle does not tell whether it was calibrated on this text")
    for caution in found["cautions"]:
        print(f"CAUTION: {caution['sentence']}")
    return 0


def shown(found, name, form):
    error = found[f"{name}_se"]
    return f"{found[name]:{form}}" + ("" if error is None else f" ±{error:{form}}")


def errors_of(found):
    if found["kl_se"] is not None:
        return "± standard error"
    from ..calibration.cautions import FEWEST_UNITS, UNIT_TOKENS
    return f"no standard errors: these take {FEWEST_UNITS * UNIT_TOKENS} tokens or more, copies left out"
