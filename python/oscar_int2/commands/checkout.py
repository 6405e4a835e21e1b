"""What commands find in a checkout of the repository."""
import os
import pathlib
import re

_TOP = pathlib.Path(__file__).resolve().parents[3]
# None where the package was installed from a wheel.
CHECKOUT = _TOP if (_TOP / "python" / "oscar_int2").is_dir() else None


def python_of_setup():
    """The Python that $OSCAR_PYTHON, or .setup.env here, names; an empty string if none."""
    file = CHECKOUT / ".setup.env" if CHECKOUT else None
    named = re.search("OSCAR_PYTHON='(.*)'", file.read_text()) if file and file.exists() else None
    return os.environ.get("OSCAR_PYTHON") or (named[1] if named else "")
