"""What this package raises. Every text says what is wrong, where, and what would be right."""


class OscarError(Exception):
    """The base of them all."""


class BundleError(OscarError, ValueError):
    """A file that is no rotation bundle, is damaged, or needs a newer reader."""


class BundleMismatchError(OscarError, ValueError):
    """A sound bundle of another model than the one it is to serve."""


class UnsupportedError(OscarError, NotImplementedError):
    """Something that is not served: beams, sliding windows, a shape without kernels, ..."""


class CacheFullError(OscarError, RuntimeError):
    """More tokens or requests than a cache was made for."""


class CacheRowError(OscarError, ArithmeticError):
    """A key or value row that no 2-bit row can hold: not finite, or too large for its metadata."""


class LogitsError(OscarError, ArithmeticError):
    """Logits that are NaN: no token follows from them."""


class SelfCheckError(OscarError, RuntimeError):
    """The 2-bit cache does not give what BF16 rows give: a wrong bundle, most likely."""
