"""Where vLLM enters (entry point group vllm.general_plugins).

A module of its own, because vLLM only logs what fails while a plugin is imported, and serves on in
BF16; what register() raises stops it.
"""
import os


def register():
    """Makes the INT2 backend known to vLLM; raises what keeps a bundle from being served."""
    try:
        from oscar_int2 import vllm
    except Exception:
        if "VLLM_OSCAR_BUNDLE" in os.environ:
            raise
        return  # vLLM is used without it
    vllm.register()
