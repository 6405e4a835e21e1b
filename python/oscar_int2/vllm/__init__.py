"""The 2-bit KV cache inside vLLM: VLLM_OSCAR_BUNDLE=bundle.h5 vllm serve MODEL

vLLM finds register() by itself, through the entry point group vllm.general_plugins, and calls it in
every process. INT2 pages are blocks of vLLM's own pool; exact windows lie beside it, one slot a
running request. What this version does not serve is refused by name (settings.py).
"""
import importlib
import os

from ..errors import UnsupportedError
from . import settings

# Releases of vLLM by the adapter that knows where they differ. Only 0.26 has run on a GPU.
ADAPTERS = {"0.26": "adapter_0_26", "0.32": "adapter_0_33", "0.33": "adapter_0_33"}


def adapter_name(version):
    """That of a vLLM of this version; None: it is not served."""
    return ADAPTERS.get(".".join(version.split(".")[:2]))


def adapter():
    """The adapter of the vLLM that is installed. Raises UnsupportedError if there is none."""
    import vllm

    name = adapter_name(vllm.__version__)
    if name is None:
        raise UnsupportedError(
            f"vLLM {vllm.__version__} is installed; the INT2 cache runs in {', '.join(ADAPTERS)}: "
            f"install one of these, or unset {settings.BUNDLE} to serve without it")
    return importlib.import_module(f".{name}", __name__)


def register():
    """Makes the backend known to this process's vLLM. Called again, it does nothing more.

    Engines that are configured without VLLM_OSCAR_BUNDLE stay as they are. Raises BundleError where
    that is set and blank, UnsupportedError for another vLLM than those of ADAPTERS.
    """
    named = settings.bundle_path()
    if named is None and settings.WEIGHTS in os.environ:
        settings.logger.warning("%s is set and %s is not: this server runs over BF16", settings.WEIGHTS,
                                settings.BUNDLE)
    try:
        found = adapter()
    except UnsupportedError:
        if named:
            raise
        return
    found.install()
