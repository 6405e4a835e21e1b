"""Which transformers the package runs in, and what is called otherwise in some of them."""
import transformers

from .errors import UnsupportedError

BEYOND = (5, 25)  # from here on none has run


def _release():
    return tuple(map(int, transformers.__version__.split(".")[:2]))


# The argument by which models and generate() take a cache, and the field in which models give it back.
CACHE = "cache" if _release() >= (5, 24) else "past_key_values"


def require_version():
    """Raises UnsupportedError for a transformers in which the package has not run: models may hand their cache on otherwise."""
    if _release() >= BEYOND:
        raise UnsupportedError(f"not supported: transformers {transformers.__version__}; install "
                               f"'transformers<{BEYOND[0]}.{BEYOND[1]}'")


def renamed(kwargs):
    """Arguments of a model, with a cache under the name of this transformers: `past_key_values` is taken everywhere."""
    if CACHE != "past_key_values" and "past_key_values" in kwargs:
        kwargs = dict(kwargs)
        kwargs[CACHE] = kwargs.pop("past_key_values")
    return kwargs
