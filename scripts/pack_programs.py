#!/usr/bin/env python3
"""Puts the programs of a build into the staged files of the Python wheel (scripts/build_wheel.sh):

    scripts/pack_programs.py BUILD STAGED

    oscar_int2/bin                    the programs, stripped, which look for libraries in the two folders below
    oscar_int2/libs                   the system's libraries that they need, but for those of C and C++
    oscar_int2/share/oscar/datasets   what the needle tasks are made of
    share                             man pages and shell completion
    licences                          the system's licence texts of what is packed

torch stays outside: programs find it in the folder torch beside oscar_int2. Without torch's programs in BUILD
nothing is packed, and a line says so. Needs patchelf and strip in PATH.
"""
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAMS = ("oscar-bundle", "oscar-calibrate", "oscar-eval", "oscar-bench")
# On every Linux that torch's own wheels run on.
SYSTEM = re.compile(r"(libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+|ld-linux-x86-64|ld-linux-aarch64)\.so\.\d+$")
RUNPATH = "$ORIGIN/../libs:$ORIGIN/../../torch/lib"
# Debian packages whose code is inside the programs; those of packed libraries are asked for.
INSIDE = ("libcli11-dev", "libeigen3-dev", "libfmt-dev", "libhdf5-dev", "nlohmann-json3-dev")


def output(*command):
    return subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout


def cached(build, name):
    """A value of CMake's cache."""
    return re.search(rf"^{name}:\w+=(.*)$", (build / "CMakeCache.txt").read_text(), re.M)[1]


def check_torch(torch):
    """The extra `tools` must ask for the torch that the programs were built with."""
    built = re.search(r"__version__ = '([\d.]+)", (torch / "version.py").read_text())[1]
    pinned = re.search(r'"torch==([\d.]+)"', (ROOT / "python" / "pyproject.toml").read_text())[1]
    if built != pinned:
        sys.exit(f"pack_programs: built with torch {built}, and python/pyproject.toml pins {pinned} for the programs")


def needed(file):
    return output("patchelf", "--print-needed", file).split()


def paths_of_libraries(file):
    """{name: path}, as the loader finds them."""
    return dict(re.findall(r"^\s*(\S+) => (/\S+)", output("ldd", file), re.M))


def system_libraries(programs, torch, openblas):
    """{name: path} of the system's libraries that programs need, with all that these need."""
    found, waiting = {}, [(file, paths_of_libraries(file)) for file in programs]
    waiting.append((openblas, paths_of_libraries(openblas)))
    found[output("patchelf", "--print-soname", openblas).strip()] = openblas
    while waiting:
        file, paths = waiting.pop()
        for name in needed(file):
            if name in found or SYSTEM.match(name) or (torch / "lib" / name).exists():
                continue
            found[name] = pathlib.Path(paths[name])
            waiting.append((found[name], paths))
    return found


def pack(source, target, runpath):
    """A stripped copy that looks for libraries in `runpath`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["strip", "--strip-unneeded", "-o", target, source], check=True)
    subprocess.run(["patchelf", "--set-rpath", runpath, target], check=True)


def write_pages(program, share):
    """Its man page and completion, which it writes itself."""
    for part, place in (("man-page", f"man/man1/{program.name}.1"),
                        ("completion", f"bash-completion/completions/{program.name}")):
        path = share / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(output(program, f"--print-{part}"))


def owner(path):
    """The Debian package of a file, which may be listed in /lib or in /usr/lib."""
    listed = re.sub("^/usr/lib/", "/lib/", str(path.resolve()))
    found = subprocess.run(["dpkg-query", "-S", listed, f"/usr{listed}"], capture_output=True, text=True, check=False)
    if not found.stdout:
        sys.exit(f"pack_programs: {path} belongs to no Debian package, and its licence is not known")
    return found.stdout.split(":")[0]


def write_licences(libraries, folder):
    """Of Debian packages; on other systems there is nothing to copy, and a line says so."""
    folder.mkdir()
    if shutil.which("dpkg-query") is None:
        print("pack_programs: no Debian system: add the licence texts of", ", ".join([*libraries, *INSIDE]))
        return
    for package in sorted({*map(owner, libraries.values()), *INSIDE}):
        shutil.copyfile(f"/usr/share/doc/{package}/copyright", folder / package)


def main(build, staged):
    programs = [build / "bin" / name for name in PROGRAMS if (build / "bin" / name).exists()]
    if not {"oscar-calibrate", "oscar-eval"} <= {path.name for path in programs}:
        print(f"pack_programs: operators only: {build}/bin lacks programs that need torch")
        return
    torch = pathlib.Path(cached(build, "OSCAR_TORCH_DIR"))
    check_torch(torch)
    libraries = system_libraries(programs, torch, pathlib.Path(cached(build, "OPENBLAS_LIBRARY")))
    package = staged / "oscar_int2"
    for program in programs:
        write_pages(program, staged / "share")
        pack(program, package / "bin" / program.name, RUNPATH)
    for name, path in libraries.items():
        pack(path, package / "libs" / name, "$ORIGIN")
    shutil.copytree(ROOT / "datasets" / "needle", package / "share" / "oscar" / "datasets" / "needle")
    write_licences(libraries, staged / "licences")
    print("pack_programs:", ", ".join(path.name for path in programs), "with", ", ".join(sorted(libraries)))


if __name__ == "__main__":
    main(*map(pathlib.Path, sys.argv[1:]))
