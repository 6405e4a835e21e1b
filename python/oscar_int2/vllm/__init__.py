"""The 2-bit KV cache inside vLLM: VLLM_OSCAR_BUNDLE=bundle.h5 vllm serve MODEL

vLLM finds register() by itself, through the entry point group vllm.general_plugins, and calls it in
every process. INT2 pages are blocks of vLLM's own pool; exact windows lie beside it, one slot a
running request. What this version does not serve is refused by name (settings.py).
"""
import functools
import importlib

from ..errors import UnsupportedError
from . import settings


@functools.cache
def adapter():
    """The module for the vLLM that is installed. Raises UnsupportedError if that lacks what we replace."""
    import vllm

    from . import versions

    versions.require(versions.ENGINE)
    if not versions.has_run(vllm.__version__):
        versions.logger.warning("the INT2 cache has not run in vLLM %s, which has all that it needs; it has in %s. "
                                "%s=1 checks it", vllm.__version__, ", ".join(versions.RAN), settings.SELF_CHECK)
    return importlib.import_module(f".{versions.adapter_name()}", __name__)


def register():
    """Makes the backend known to this process's vLLM. Called again, it does nothing more.

    Engines that are configured without VLLM_OSCAR_BUNDLE stay as they are. Raises BundleError where that is
    set and blank, and for a VLLM_OSCAR_ variable that does not exist, UnsupportedError for a vLLM that lacks what we replace.
    """
    settings.require_known_variables()
    named = settings.bundle_path()
    try:
        adapter()
    except UnsupportedError:
        if named:
            raise
        return
    from . import hooks

    hooks.install()
