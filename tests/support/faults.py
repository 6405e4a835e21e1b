"""Programs of which one system call fails, or that are killed there (fault_shim.c)."""
import dataclasses
import hashlib
import os
import pathlib
import re
import subprocess

from support.programs import BIN, ENVIRONMENT

SHIM = BIN.parent / "lib" / "oscar_fault_shim.so"
KINDS = ("open", "write", "sync", "rename", "alloc", "thread")
# Of a run that was killed; the next run of the same output removes them.
LEFT = re.compile(r"\.[0-9a-f]{16}\.tmp(/.*)?$")
# Sweeps are complete where this is set, and by stride elsewhere.
COMPLETE = os.environ.get("OSCAR_FAULTS") == "all"


def run(command, fault=None, counts=None):
    environment = ENVIRONMENT | {"LD_PRELOAD": str(SHIM)}
    if fault:
        environment["OSCAR_FAULT"] = fault
    if counts:
        environment["OSCAR_FAULT_COUNTS"] = str(counts)
    return subprocess.run([str(word) for word in command], env=environment, timeout=300,
                          capture_output=True)


def content(folder):
    """Relative path -> hash of each file; folders end in a slash."""
    return {str(path.relative_to(folder)) + ("/" if path.is_dir() else ""):
            "" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
            for path in folder.rglob("*")}


@dataclasses.dataclass
class Sweep:
    """One command over all its faults. `reset` brings `folder` to its state before the command."""
    name: str
    command: list
    folder: pathlib.Path
    reset: object
    again: list = None       # what is run after a kill (default: the command)
    may_stay: tuple = ()     # names that a stopped run may leave, for `again`
    most: int = 4            # calls of a kind that are tried: spread evenly, and the last one
    kinds: tuple = KINDS

    def points(self, counts):
        for kind in self.kinds:
            total = counts[kind]
            most = total if COMPLETE and kind not in ("alloc", "thread") else min(total, self.most)
            for number in range(1, most + 1):
                for how in ("fail", "kill"):
                    yield f"{kind}:{-(-total * number // most)}:{how}"

    def run(self, case, scratch):
        """Tries each fault; the number of them by kind."""
        self.reset()
        before = content(self.folder)
        counts_file = scratch / "counts"
        whole = run(self.command, counts=counts_file)
        case.assertEqual(whole.returncode, 0, whole.stderr)
        after = content(self.folder)
        counts = {kind: int(count) for kind, count in
                  (line.split() for line in counts_file.read_text().splitlines())}
        tried = dict.fromkeys(KINDS, 0)
        for fault in self.points(counts):
            with case.subTest(self.name, fault=fault):
                self.reset()
                result = run(self.command, fault)
                # Libraries crash where they find no memory; ours say so.
                codes = (1, -6, -11) if fault.startswith("alloc") else (1,)
                self.check(case, before, after, result, codes, fault.endswith("kill"))
                tried[fault.split(":")[0]] += 1
        return counts, tried

    def check(self, case, before, after, result, codes, killed):
        """`codes`: of runs that neither succeed nor are killed."""
        said = f"{result.returncode} {result.stderr.decode(errors='replace')[-400:]}"
        found = content(self.folder)
        if killed:
            found = {name: value for name, value in found.items() if not LEFT.search(name.rstrip("/"))}
        found = {name: value for name, value in found.items() if name not in self.may_stay}
        case.assertIn(found, (before, after), said)
        if result.returncode == 0:
            case.assertEqual(found, after, said)
        elif not killed:
            case.assertIn(result.returncode, codes, said)
        if content(self.folder) == after:
            return
        again = run(self.again or self.command)
        case.assertEqual(again.returncode, 0, again.stderr)
        case.assertEqual(content(self.folder), after, said)
