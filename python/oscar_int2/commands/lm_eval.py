"""lm-eval's own command, with one more model: oscar_int2, a model of transformers over the 2-bit cache.

    python -m oscar_int2 lm-eval --model oscar_int2 --tasks TASK,... --model_args \\
      pretrained=MODEL,bundle=BUNDLE

All options are lm-eval's: `python -m oscar_int2 lm-eval run --help` lists them. Arguments of the model are those
of lm-eval's `hf`, and:
    bundle=FILE       the bundle of that model
    demote_block=N    tokens that leave the exact window at once (16)
    weights=any       takes the bundle of other weights
"""
import sys


def main(words):
    if words in (["-h"], ["--help"]):
        print("usage: python -m oscar_int2 lm-eval [OPTION]...\n\n" + __doc__)
        return 0
    try:
        from lm_eval.__main__ import cli_evaluate
        from .. import lm_eval  # registers the model
    except ImportError as error:
        sys.exit(f"error: lm-eval cannot be imported: {error}\n  hint: install lm-eval[hf] from 0.4.13 on, as the wheel's "
                 "extra `study` does")
    sys.argv = ["lm-eval", *words]
    return cli_evaluate()
