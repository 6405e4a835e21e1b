"""Where vLLM enters (entry point group vllm.general_plugins).

A module of its own, because vLLM only logs what fails while a plugin is imported, and serves on in
BF16; what register() raises stops it.
"""
import importlib
import os


def register():
    """Makes the INT2 backend known to vLLM; raises what keeps a bundle from being served."""
    try:
        from oscar_int2 import vllm
    except Exception:
        if "VLLM_OSCAR_BUNDLE" in os.environ:
            _ask_again()
            raise
        return  # vLLM is used without it
    try:
        vllm.register()
    except Exception:
        _ask_again()
        raise


def _ask_again():
    """vLLM asks its plugins once a process, also where one of them refuses: the next engine, by whom the variable was
    corrected, would be served in BF16."""
    importlib.import_module("vllm.plugins").plugins_loaded = False
