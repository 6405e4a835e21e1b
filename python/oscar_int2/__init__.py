"""The 2-bit KV cache of OSCAR Toolkit for Python servers.

    oscar_int2.calibrate(model, corpus, out)   a bundle for a model, by the program oscar-calibrate
    oscar_int2.evaluate(model, bundle, corpus=...).frame()   every figure of oscar-eval, for pandas
    oscar_int2.fit, import_rotation, plan      the same of oscar-bundle
    bundle = oscar_int2.load("bundle.h5")      a rotation bundle, checked
    oscar_int2.LayerCodec                      one layer: transforms, pages, attention
    oscar_int2.Generator                       an own decode loop over a CUDA graph
    oscar_int2.calibration                     bundles of models that transformers runs, whatever their family
    oscar_int2.transformers                    model.generate() of transformers over the 2-bit cache
    oscar_int2.vllm                            the same in vLLM, found there by itself
    oscar_int2.status(model)                   which bundle is in use, and what is held in 2 bits
    python -m oscar_int2                       commands: answers, doctor, fetch, lm-eval, ...; without one it lists them

Underneath are torch operators, torch.ops.oscar_int2; kernels/README.md has their table.
"""
import sys

from ._version import __version__

# `python -m oscar_int2 COMMAND` imports the package before the command. A command loads what it needs: some run
# before torch and the library are there.
_IS_PROGRAM = sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)].removeprefix("-m") == __name__
if not _IS_PROGRAM:
    from ._library import PAGE_TOKENS, ops
    from .api import Evaluation, calibrate, evaluate, fit, import_rotation, plan
    from .bundle import Bundle, load
    from .codec import LayerCodec, LayerPages, StepTables
    from .errors import (BundleError, BundleMismatchError, CacheFullError, CacheRowError, LogitsError, OscarError,
                         SelfCheckError, UnsupportedError)
    from .generator import Generator
    from .recipe import CacheFormat
    from .status import Status, status

__all__ = ["Bundle", "BundleError", "BundleMismatchError", "CacheFormat", "CacheFullError", "CacheRowError",
           "Evaluation", "Generator", "LayerCodec", "LayerPages", "LogitsError", "OscarError",
           "SelfCheckError", "Status", "StepTables", "UnsupportedError", "calibrate", "evaluate", "fit",
           "import_rotation", "load", "ops", "plan", "status"]
