"""Which transformers the package runs in."""
import transformers

from .errors import UnsupportedError

BEYOND = (5, 24)  # from here on models take `cache` in place of `past_key_values`, and would pass ours by


def require_version():
    """Raises UnsupportedError for a transformers whose models hand their cache on by another name."""
    if tuple(map(int, transformers.__version__.split(".")[:2])) >= BEYOND:
        raise UnsupportedError(f"not supported: transformers {transformers.__version__}; install "
                               f"'transformers<{BEYOND[0]}.{BEYOND[1]}'")
