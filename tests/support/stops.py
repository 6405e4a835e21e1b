"""Runs that signals stop in every stage, and that are then resumed.

OSCAR_KILLS=N stops each command N times, by one of three signals, at random moments of a printed
seed, which OSCAR_SEED=S repeats; rounds of two runs at once are then N too. Without it, a few."""
import collections
import os
import pty
import random
import re
import secrets
import signal
import subprocess
import time

from support.faults import LEFT, content
from support.programs import ENVIRONMENT

KILLS = int(os.environ.get("OSCAR_KILLS", 0))
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
# Of a run that a signal stopped: signals other than SIGKILL end it themselves until it handles them.
CODES = {signal.SIGKILL: (-9,), signal.SIGTERM: (-15, 130), signal.SIGINT: (-2, 130)}


def random_source(case):
    seed = int(os.environ.get("OSCAR_SEED") or secrets.randbits(32))
    print(f"{case.id()}: OSCAR_SEED={seed}")
    return random.Random(seed)


POLL = "7"  # the system call, on x86-64


def wait_until_held(process):
    """Until a run waits for a stream: it is found in poll() ten times in a row, within .3 s."""
    found, end = 0, time.monotonic() + 60
    while found < 10:
        with open(f"/proc/{process.pid}/syscall", encoding="ascii") as file:
            found = found + 1 if file.read().split()[0] == POLL else 0
        assert process.poll() is None and time.monotonic() < end, "the run did not wait"
        time.sleep(.03)


class Watched:
    """A run on a terminal, where a stage is announced when it begins."""

    def __init__(self, command, stdout=subprocess.DEVNULL):
        self.terminal, stderr = pty.openpty()
        self.began = time.monotonic()
        self.process = subprocess.Popen([str(word) for word in command], env=ENVIRONMENT,
                                        stdout=stdout, stderr=stderr)
        os.close(stderr)
        self.said = b""

    def read(self):
        """More of what the run says; False once it has ended."""
        try:
            self.said += os.read(self.terminal, 4096)
            return True
        except OSError:
            return False

    def wait_for(self, announcement):
        while not re.search(announcement, self.said) and self.read():
            pass
        return time.monotonic()

    def finish(self):
        while self.read():
            pass
        os.close(self.terminal)
        return self.process.wait(timeout=60)


class StoppedRuns:
    """A command that is stopped and resumed until it is done. `stages`: name -> what the terminal
    says when it begins, the first one nothing; `command(out, *options)`."""

    def __init__(self, case, stages, command, out):
        self.case, self.stages, self.command, self.out = case, stages, command, out
        self.whole = out.with_name("whole" + out.suffix)
        self.seconds = self.run_alone()
        self.bytes = self.whole.read_bytes()
        self.names = {path.name for path in out.parent.iterdir()} | {out.name}
        self.stopped = collections.Counter()

    def run_alone(self):
        """Seconds that each stage takes."""
        run = Watched(self.command(self.whole))
        begins = {}
        for stage, announcement in self.stages.items():
            begins[stage] = run.wait_for(announcement) if announcement else run.began
            if not re.search(announcement, run.said):
                del begins[stage]
        self.case.assertEqual(run.finish(), 0, run.said.decode())
        ordered = sorted(begins, key=begins.get)
        ends = [*(begins[stage] for stage in ordered[1:]), time.monotonic()]
        return {stage: end - begins[stage] for stage, end in zip(ordered, ends)}

    def moments(self, listed, with_signal):
        """(stage, share of it, signal): those listed, or as many random ones as were asked for."""
        if not KILLS:
            return [(stage, share, with_signal) for stage, shares in listed.items()
                    for share in shares if stage in self.seconds]
        source, stages = random_source(self.case), [*self.seconds]
        moments = []
        while len(moments) < KILLS:  # a run can be stopped often only if later stages come later
            some = [(source.randrange(len(stages)), source.random(), source.choice(SIGNALS))
                    for _ in range(min(20, KILLS - len(moments)))]
            moments += [(stages[stage], *rest) for stage, *rest in sorted(some)]
        return moments

    def left_by_kills(self):
        return {path.name for path in self.out.parent.iterdir() if LEFT.search(path.name)}

    def stop(self, stage, share, with_signal):
        """One run that is stopped there, if the signal comes soon enough."""
        case, said = self.case, f"{with_signal.name} in {stage}, {share:.0%} of {self.seconds[stage]:.2f} s"
        before = self.left_by_kills()
        run = Watched(self.command(self.out, "--resume"))
        if self.stages[stage]:
            run.wait_for(self.stages[stage])
        time.sleep(share * self.seconds[stage])
        run.process.send_signal(with_signal)
        code = run.finish()
        case.assertIn(code, (0, *CODES[with_signal]), said + run.said.decode())
        if code:
            self.stopped[stage, with_signal.name] += 1
        checkpoint = self.out.with_name(self.out.name + ".checkpoint")
        found = {path.name for path in self.out.parent.iterdir()}
        # A run may be stopped before it removes what an earlier one left.
        found -= self.left_by_kills() if with_signal == signal.SIGKILL else before
        case.assertLessEqual(found, self.names | {checkpoint.name}, said)
        if self.out.exists() and self.out.read_bytes() == self.bytes:
            self.out.unlink()  # complete, whether or not the run lived to say so
        elif self.out.exists():  # figures of a part, which oscar-eval writes when it is asked to stop
            case.assertIn(b'"partial"', self.out.read_bytes(), said)
            case.assertTrue(checkpoint.exists(), said)

    def expect_the_same_bytes(self, moments):
        for moment in moments:
            self.stop(*moment)
        self.case.run_ok(*self.command(self.out, "--resume"))
        self.case.assertEqual(self.out.read_bytes(), self.bytes)
        self.case.assertEqual({path.name for path in self.out.parent.iterdir()}, self.names)
        print(f"{self.case.id()}: stopped {dict(self.stopped)}")
        # A busy machine may be past a moment before the signal comes; most must have been in time.
        self.case.assertGreaterEqual(2 * self.stopped.total(), len(moments), self.stopped)


def stop_at_random(case, sweep):
    """Kills the command of a support.faults.Sweep; says how often, and what was there then."""
    words = [str(word) for word in sweep.command]
    sweep.reset()
    before, began = content(sweep.folder), time.monotonic()
    whole = subprocess.run(words, env=ENVIRONMENT, timeout=300, capture_output=True)
    seconds = time.monotonic() - began
    case.assertEqual(whole.returncode, 0, whole.stderr)
    after, source, stopped = content(sweep.folder), random_source(case), collections.Counter()
    for _ in range(KILLS or 6):
        with_signal, moment = source.choice(SIGNALS), source.uniform(0, seconds)
        with case.subTest(sweep.name, signal=with_signal.name, moment=moment):
            sweep.reset()
            process = subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.PIPE,
                                       stderr=subprocess.PIPE)
            time.sleep(moment)
            process.send_signal(with_signal)
            out, said = process.communicate(timeout=60)
            found = content(sweep.folder)
            state = "old" if found == before else "new" if found == after else "temporary left"
            stopped[state, with_signal.name] += process.returncode != 0
            result = subprocess.CompletedProcess(words, process.returncode, out, said)
            sweep.check(case, before, after, result, CODES[with_signal],
                        with_signal == signal.SIGKILL)
    print(f"{case.id()}: {sweep.name}: stopped {dict(+stopped)}")
