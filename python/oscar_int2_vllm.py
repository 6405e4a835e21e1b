"""Where vLLM enters (entry point group vllm.general_plugins).

A module of its own, because vLLM only logs what fails while a plugin is imported, and serves on in
BF16; what register() raises stops it.
"""
import importlib
import os


def register():
    """Makes the INT2 backend known to vLLM; raises what keeps a bundle from being served.

    vLLM asks its plugins once a process, also where one of them refuses. It is made to ask again, since else the next
    engine of this process, after the variable was corrected, would be served in BF16.
    """
    try:
        _register()
    except Exception:
        importlib.import_module("vllm.plugins").plugins_loaded = False
        raise


def _register():
    try:
        from oscar_int2 import vllm
    except Exception:
        if "VLLM_OSCAR_BUNDLE" in os.environ:
            raise
        return  # vLLM is used without it
    vllm.register()
