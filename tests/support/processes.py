"""Runs of a program that several processes share, started as torchrun and as --gpus do."""
import pathlib
import socket
import subprocess
import time

from support.programs import ENVIRONMENT, ProgramTest

PATIENCE = 60


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class SharedRuns(ProgramTest):
    """A test of runs towards a file `out`. `model`: the folder that they open."""
    model = None

    def command(self, out, *options):
        raise NotImplementedError

    def run_one(self, out, *options, **changes):
        return subprocess.run(self.command(out, *options), capture_output=True, text=True,
                              env=ENVIRONMENT | changes, timeout=4 * PATIENCE)

    def bytes_of(self, out, *options):
        result = self.run_one(out, *options)
        self.assertEqual(result.returncode, 0, result.stderr)
        return (self.folder / out).read_bytes()

    def start(self, count, out, *options, each=lambda rank: ()):
        """As torchrun does."""
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
                  "WORLD_SIZE": str(count)}
        processes = []
        for rank in range(count):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(subprocess.Popen(
                self.command(out, *options, *each(rank)), env=ENVIRONMENT | shared | own,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
            self.addCleanup(processes[-1].communicate)
            self.addCleanup(processes[-1].kill)
        return processes

    def start_parent(self, count, out, *options):
        """--gpus; and the ids of its processes, all at work."""
        parent = subprocess.Popen(self.command(out, *options, "--gpus", count),
                                  env=ENVIRONMENT, stdout=subprocess.DEVNULL,
                                  stderr=subprocess.PIPE, text=True)
        self.addCleanup(parent.communicate)
        self.addCleanup(parent.kill)
        children = pathlib.Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        self.wait_for(lambda: len(children.read_text().split()) == count)
        ids = [int(pid) for pid in children.read_text().split()]
        for pid in ids:
            self.wait_until_at_work(pid)
        return parent, ids

    def wait_for(self, condition):
        end = time.monotonic() + PATIENCE
        while not condition():
            self.assertLess(time.monotonic(), end)
            time.sleep(.01)

    def wait_for_line(self, process, beginning):
        """Of what it says on stderr, where no --quiet keeps it from it."""
        for line in process.stderr:
            if line.startswith(beginning):
                return
        self.fail(f"{beginning} was not said")

    def wait_until_at_work(self, pid):
        """The weights are opened after the processes have found each other."""
        maps = pathlib.Path(f"/proc/{pid}/maps")
        self.wait_for(lambda: f"{self.model}/" in maps.read_text())

    def end_of(self, process):
        _, said = process.communicate(timeout=PATIENCE)
        return process.returncode, said

    def expect_word_of_a_lost_first(self, out):
        """The first is killed: the others say so."""
        processes = self.start(3, out)
        for process in processes:
            self.wait_until_at_work(process.pid)
        processes[0].kill()
        for process in processes[1:]:
            code, said = self.end_of(process)
            self.assertEqual(code, 1, said)
            self.assertIn("process 0 of 3 has ended", said)

    def expect_refusal_of_another_run(self, out):
        """One of other options is refused, and the first says it."""
        processes = self.start(2, out, each=lambda rank: ["--seed", rank])
        code, said = self.end_of(processes[0])
        self.assertEqual(code, 1, said)
        self.assertIn("process 1 of 2 has failed: this process would do another run", said)
        self.assertEqual(self.end_of(processes[1]), (1, ""))
