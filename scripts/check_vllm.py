#!/usr/bin/env python3
"""Checks with pyright that a vLLM has every name, parameter and attribute that the plugin uses of it.

    scripts/check_vllm.py VLLM ...     each a wheel, or a folder that holds vllm/

Sources are read, never imported: a wheel of another machine's will do. pyright is that of this Python
(scripts/setup.sh --tests), and so are torch's types.
"""
import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile

PYTHON = pathlib.Path(__file__).resolve().parent.parent / "python"
PLUGIN = PYTHON / "oscar_int2" / "vllm"
# transformers would take most of the time, and what the plugin uses has no types of it.
LEFT_OUT = ("transformers", "vllm", "oscar_int2")
RULES = ("reportAbstractUsage", "reportArgumentType", "reportAttributeAccessIssue", "reportCallIssue",
         "reportGeneralTypeIssues", "reportIncompatibleMethodOverride", "reportMissingImports",
         "reportUndefinedVariable")
# What the plugin's own lines do not prove: that vLLM knows the class attributes that we set, and that
# our classes define all that is abstract there.
MORE = """
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from vllm.v1.attention.backends import fa_utils
from oscar_int2.vllm.{adapter} import CacheShape
from oscar_int2.vllm.backend import OscarAttention, OscarBackend, OscarMetadataBuilder

AttentionBackend.supported_dtypes, AttentionBackend.supported_kv_cache_dtypes
AttentionBackend.forward_includes_kv_cache_update
AttentionMetadataBuilder._cudagraph_support, AttentionMetadataBuilder.reorder_batch_threshold
AttentionImpl.supports_quant_query_input
fa_utils.flash_attn_varlen_func

class Backend(OscarBackend, CacheShape): ...

def make(spec, config, device, builder: AttentionMetadataBuilder):
    builder.kv_cache_spec
    return Backend(), OscarAttention(1, 1, 1.0), OscarMetadataBuilder(spec, [], config, device)
"""
# Names that __getattr__ of a module there would hide the lack of.
HIDDEN = {"platforms/__init__.py": "current_platform"}
# Packages that vLLM brings, as far as the plugin sees them.
STUBS = {
    "prometheus_client": "from typing import Any\ndef __getattr__(name: str) -> Any: ...\n",
    "msgspec": """
from typing import Any, dataclass_transform
def __getattr__(name: str) -> Any: ...
def field(*, default: Any = ..., default_factory: Any = ..., name: Any = ...) -> Any: ...
@dataclass_transform(field_specifiers=(field,))
class Struct:
    def __init_subclass__(cls, **options: Any) -> None: ...
""",
}


def adapter_of(package):
    """What the plugin takes for a folder vllm/ (versions.py)."""
    new = "def supported_kv_cache_layouts(" in (package / "v1/attention/backend.py").read_text()
    return "adapter_0_33" if new else "adapter_0_26"


def version_of(package):
    """That of a folder vllm/. Raises LookupError where it is not said."""
    file = package / "_version.py"
    text = file.read_text() if file.is_file() else ""
    found = re.search(r"^__version__ = version = ['\"]([\d.]+)", text, re.MULTILINE)
    if not found:
        raise LookupError(f"{package} does not say its version: there is no {file.name} with one; name a wheel, or a "
                          "folder with an installed vllm/")
    return found[1]


def unpacked(source, folder):
    """The folder vllm/ of a source; a wheel's is unpacked into `folder`."""
    package = pathlib.Path(source).absolute() / "vllm"
    if zipfile.is_zipfile(source):
        with zipfile.ZipFile(source) as wheel:
            wheel.extractall(folder, [name for name in wheel.namelist()
                                      if name.startswith("vllm/") and name.endswith((".py", ".pyi"))])
        package = folder / "vllm"
    if not (package / "__init__.py").is_file():
        raise FileNotFoundError(f"{source} holds no vllm/__init__.py: name a wheel of vLLM, or a folder with vllm/")
    return package


def problems_of(package, adapter):
    """What pyright finds in the plugin with this vLLM: "file:line: text" each."""
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        site = folder / "types/lib/python3.11/site-packages"
        site.mkdir(parents=True)
        for entry in pathlib.Path(sysconfig.get_path("purelib")).iterdir():
            if entry.name not in LEFT_OUT and not entry.name.endswith((".dist-info", ".pth")):
                (site / entry.name).symlink_to(entry)
        (site / "vllm").symlink_to(package)
        for name, text in STUBS.items():
            (folder / f"{name}.pyi").write_text(text)
        (folder / "more.py").write_text(MORE.format(adapter=adapter))
        ours = [path for path in PLUGIN.glob("*.py") if path.stem == adapter or not path.stem.startswith("adapter_")]
        (folder / "pyrightconfig.json").write_text(json.dumps({
            "include": ["more.py", *map(str, ours)], "extraPaths": [str(folder), str(PYTHON)],
            "venvPath": str(folder), "venv": "types", "pythonVersion": "3.11", "pythonPlatform": "Linux",
            "typeCheckingMode": "off", **dict.fromkeys(RULES, "error")}))
        done = subprocess.run([sys.executable, "-m", "basedpyright", "-p", folder, "--outputjson"],
                              capture_output=True, text=True, env={**os.environ, "NO_COLOR": "1"})
    if done.returncode not in (0, 1):
        raise OSError(f"pyright failed; scripts/setup.sh --tests installs it:\n{done.stderr or done.stdout}")
    report = json.loads(done.stdout)
    if report["summary"]["filesAnalyzed"] != len(ours) + 1:
        raise OSError(f"pyright read {report['summary']['filesAnalyzed']} files of {len(ours) + 1}")
    hidden = [f"{file}: {name} is not there" for file, name in HIDDEN.items()
              if not re.search(rf"^ +{name}: ", (package / file).read_text(), re.MULTILINE)]
    return hidden + [
        f"{pathlib.Path(found['file']).name}:{found['range']['start']['line'] + 1}: {found['message']} "
        f"({found.get('rule')})" for found in report["generalDiagnostics"]]


def check(source):
    """(version, adapter, problems)."""
    with tempfile.TemporaryDirectory() as folder:
        package = unpacked(source, pathlib.Path(folder))
        version, adapter = version_of(package), adapter_of(package)
        return version, adapter, problems_of(package, adapter)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="+", metavar="VLLM", help="a wheel, or a folder that holds vllm/")
    failed = False
    for source in parser.parse_args().sources:
        try:
            version, adapter, problems = check(source)
        except (LookupError, OSError) as error:
            sys.exit(f"check_vllm: {error}")
        print(*problems, f"{source}: vLLM {version}, {adapter}: {len(problems)} problems", sep="\n")
        failed |= bool(problems)
    sys.exit(failed)


if __name__ == "__main__":
    main()
