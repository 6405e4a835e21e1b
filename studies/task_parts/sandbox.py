"""Runs code that a model wrote: a process of its own with little time and memory, no files, no other programs, no network."""
import os
import resource
import secrets
import subprocess
import sys
import tempfile

CPU_SECONDS, WALL_SECONDS, MEMORY, OPEN_FILES = 5, 15, 512 << 20, 32

# The answer is not an attacker. The hook stops what it may do by mistake; the limits stop what runs away.
_HARNESS = """
import os, sys
program, said = sys.stdin.read(), os.dup(1)
word, program = program.split("\\n", 1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
import collections, copy, functools, heapq, itertools, json, math, operator, random, re, string, typing, hashlib, datetime
def refuse(event, arguments):
    if event == "open":
        path, mode, flags = arguments
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            raise PermissionError("files are not written here")
    elif event.startswith(("os.", "shutil.", "subprocess.", "socket.", "ctypes.", "pty.", "webbrowser.", "urllib.")):
        if event not in ("os.listdir", "os.scandir", "os.walk", "os.fwalk"):
            raise PermissionError(event + " is not allowed here")
sys.addaudithook(refuse)
names = {"__name__": "answer"}
exec(compile(program, "answer", "exec"), names)
os.write(said, f"{word}{names.get('RESULT', '')}".encode())
"""


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _run(program: str):
    """What it leaves in RESULT, as text; None when it does not come to its end: an error, exit(), too much time or memory."""
    word = secrets.token_hex(16)
    given = word + "\n" + program.encode("utf-8", "replace").decode()
    with tempfile.TemporaryDirectory() as folder:
        with subprocess.Popen([sys.executable, "-I", "-S", "-B", "-c", _HARNESS], cwd=folder, env={"PYTHONHASHSEED": "0"},
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, encoding="utf-8",
                              errors="replace", start_new_session=True, preexec_fn=_limit) as process:
            try:
                said, _ = process.communicate(given, timeout=WALL_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.communicate()
                return None
    return said[len(word):] if said.startswith(word) else None


def passes(program: str) -> bool:
    """Whether a program comes to its end."""
    return _run(program) is not None


def counted(program: str) -> int:
    """The number that a program leaves in RESULT; 0 when it does not come to its end."""
    return int(_run(program) or 0)
