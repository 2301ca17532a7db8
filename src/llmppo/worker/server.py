"""The worker: imports once, loads base models once, and forks for each stage.

It must stay single-threaded, since a fork copies only the thread that calls it, locks held by others
included; it refuses to fork otherwise. It ends with the Snakemake process it belongs to, or when idle.
"""

import gc
import os
import select
import selectors
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hmac import compare_digest
from pathlib import Path
from typing import Any

from llmppo.errors import less_memory
from llmppo.process import PARENT, die_with
from llmppo.worker.client import OFF, WORKER
from llmppo.worker.messages import INTERRUPT, receive, send
from llmppo.worker.place import new_key, token_file

IDLE_S = 900.0
LOOK_S = 0.5
REQUEST_S = 10.0  # for a client to say what it wants
CREDENTIALS = struct.Struct("3i")  # struct ucred of unix(7): process, user, group


def _say(text: str) -> None:
    print(f"worker {os.getpid()}: {text}", file=sys.stderr, flush=True)


@dataclass
class Job:
    """A stage at work in a child process, and the client that waits for it."""

    connection: socket.socket
    pid: int
    pidfd: int


class Worker:
    """Listens on `path` until process `workflow` ends."""

    def __init__(self, path: Path, workflow: int) -> None:
        self.path = path
        self.selector = selectors.DefaultSelector()
        self.workflow = os.pidfd_open(workflow)
        self.selector.register(self.workflow, selectors.EVENT_READ, "workflow")
        self.jobs: list[Job] = []
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def listen(self) -> None:
        self.token = new_key(token_file(self.path))
        self.listener.bind(str(self.path))
        self.listener.listen(64)
        self.selector.register(self.listener, selectors.EVENT_READ, "client")

    @contextmanager
    def looking_out(self) -> Iterator[None]:
        """Within, which takes seconds, end at once when the workflow does: a timer looks, since threads are ruled out."""

        def look(*_: object) -> None:
            if select.select([self.workflow], [], [], 0)[0]:
                os._exit(0)

        signal.signal(signal.SIGALRM, look)
        signal.setitimer(signal.ITIMER_REAL, LOOK_S, LOOK_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def serve(self) -> str:
        """Serve until the workflow ends or nothing was asked for long; why it ended."""
        while True:
            events = self.selector.select(IDLE_S)
            if not events and not self.jobs:
                return "idle"
            for key, _ in events:
                if key.data == "workflow":
                    return "the workflow ended"
                if key.data == "client":
                    self.accept()
                elif key.data in self.jobs:  # else it ended in this very round
                    self.attend(key.data, key.fileobj)

    def accept(self) -> None:
        connection, _ = self.listener.accept()
        files: list[int] = []
        try:
            _, user, _ = CREDENTIALS.unpack(
                connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
            )
            if user != os.getuid():
                raise PermissionError(f"user {user} is not ours")
            connection.settimeout(REQUEST_S)
            request, files = receive(connection, descriptors=3)
            if not compare_digest(str(request.get("token")).encode(), self.token.encode()):
                raise PermissionError("a request without this worker's token")
            self.fork(connection, request, files)
        except (OSError, EOFError, ValueError) as error:
            _say(f"a request failed: {error!r}")
            connection.close()
        finally:  # a child has its own copies, and doesn't come here
            for file in files:
                os.close(file)

    def fork(self, connection: socket.socket, request: dict[str, Any], files: list[int]) -> None:
        """Start a child for a request; the client hears at once whether there is one."""
        from llmppo.stages.loading import keep_base

        if request["base"] is not None:
            keep_base(Path(request["base"]))  # the path as given gets into the adapters' config
        threads = len(os.listdir("/proc/self/task"))
        if threads > 1:
            _say(f"{threads} threads: not forking")
            send(connection, {"forked": False})
            connection.close()
        else:
            gc.freeze()  # else the child's collector touches, and so copies, every page
            worker = os.getpid()
            pid = os.fork()
            if pid == 0:
                self.become_stage(worker, request, files)
            _say(f"{request['arguments'][0]} in process {pid}")
            job = Job(connection, pid, os.pidfd_open(pid))
            self.jobs.append(job)
            self.selector.register(connection, selectors.EVENT_READ, job)
            self.selector.register(job.pidfd, selectors.EVENT_READ, job)
            with suppress(OSError):  # a client that is gone shows as such in the next round
                send(connection, {"forked": True})

    def become_stage(self, worker: int, request: dict[str, Any], files: list[int]) -> None:
        """In the child: be the process that the client would have been, and end. Doesn't return."""
        status = 1
        stage = request["arguments"][0]
        last_words = f"llmppo {stage}: error: memory ran out. {less_memory(stage)}\n".encode()
        try:
            die_with(worker)
            self.forget()
            for number, file in enumerate(files):
                os.dup2(file, number)
                os.close(file)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.umask(request["umask"])
            os.environ.clear()
            os.environ.update(request["environment"])
            os.environ[WORKER] = OFF
            os.environ.pop(PARENT, None)
            status = run_command(request["arguments"])
        except MemoryError:  # in the midst of telling it: a buffer of its own is more than there is
            os.write(2, last_words)
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def forget(self) -> None:
        """In the child: close what belongs to the worker and to the other stages."""
        for job in self.jobs:
            job.connection.close()
            os.close(job.pidfd)
        self.selector.close()
        self.listener.close()
        os.close(self.workflow)

    def attend(self, job: Job, source: Any) -> None:
        """A child ended, or its client spoke or went away."""
        if source == job.pidfd:
            _, status = os.waitpid(job.pid, 0)
            with suppress(OSError):
                send(job.connection, {"status": status})
            self.drop(job)
            return
        try:
            said = job.connection.recv(64)
        except OSError:
            said = b""
        signal.pidfd_send_signal(job.pidfd, signal.SIGINT if INTERRUPT in said else signal.SIGKILL)
        if not said:
            self.selector.unregister(job.connection)

    def drop(self, job: Job) -> None:
        self.jobs.remove(job)
        with suppress(KeyError):
            self.selector.unregister(job.connection)
        self.selector.unregister(job.pidfd)
        job.connection.close()
        os.close(job.pidfd)

    def end(self) -> None:
        """Take no more requests, and leave no child behind."""
        self.path.unlink(missing_ok=True)
        token_file(self.path).unlink(missing_ok=True)
        self.listener.close()
        for job in self.jobs:
            signal.pidfd_send_signal(job.pidfd, signal.SIGKILL)
            os.waitpid(job.pid, 0)


def run_command(arguments: list[str]) -> int:
    """Run `llmppo ARGUMENTS` in this process; its exit status."""
    from llmppo.cli import main

    try:
        main.main(arguments, prog_name="llmppo")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def import_libraries() -> None:
    """Everything that the stages import, so that the children find it imported."""
    from llmppo.stages.loading import import_model_libraries

    import_model_libraries()
    import pyarrow
    import tqdm  # type: ignore[import-untyped]

    from llmppo.engines import hf
    from llmppo.stages import base_model, critic_warmup, evaluate, export, rollout, update
    from llmppo.trainer import agent, checkpoint
    from llmppo.trajectories import collect

    tqdm.tqdm.monitor_interval = 0  # its monitor is a thread
    pyarrow.array([0])  # the first array imports pandas, which takes half a second
    assert all((hf, base_model, critic_warmup, evaluate, export, rollout, update, agent, checkpoint, collect))


def main() -> None:
    """`python -m llmppo.worker.server SOCKET WORKFLOW_PID`."""
    path, workflow = Path(sys.argv[1]), int(sys.argv[2])
    try:
        worker = Worker(path, workflow)
    except ProcessLookupError:
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ[WORKER] = OFF
    with worker.looking_out():
        import_libraries()
    worker.listen()
    _say(f"ready for workflow {workflow}")
    try:
        _say(f"ending: {worker.serve()}")
    finally:
        worker.end()
        spent = os.times()
        _say(
            f"{spent.user + spent.system:.2f} CPU s, and {spent.children_user + spent.children_system:.2f} of the stages"
        )


if __name__ == "__main__":
    main()
