"""Overlapped steps (async scheduling) on a CPU, whose platform in vLLM switches them off.

The scheduler begins a step before it knows the tokens of the last one, as on a GPU. The worker computes it at once:
what two streams of a GPU could mix up is not seen here.
"""
import contextlib
from unittest import mock

import torch


@contextlib.contextmanager
def overlapped():
    """Engines that are made here overlap their steps if they are asked to."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    check = platform.check_and_update_config

    def keep(config):
        asked = config.scheduler_config.async_scheduling
        check(config)
        config.scheduler_config.async_scheduling = asked

    with contextlib.ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(mock.patch.object(platform, "check_and_update_config", staticmethod(keep)))
        yield
