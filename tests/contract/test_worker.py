"""The worker: stages forked from it end as cold ones do, and whatever goes wrong with it costs no result."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmppo.experiment import load_experiment, variant_config
from llmppo.process import PARENT
from llmppo.stage_settings import stage_settings
from llmppo.worker import place as place_module
from llmppo.worker.client import OFF, WORKER, offered
from llmppo.worker.messages import receive, send
from llmppo.worker.place import find_place, key_of, private_folder
from llmppo.worker.server import Worker

REPOSITORY = Path(__file__).resolve().parents[2]
LLMPPO = str(Path(sys.executable).with_name("llmppo"))
CONFIG = REPOSITORY / "config" / "test" / "tiny.yaml"
NOBODY = 65534
SLEEPY = """
import pathlib, time
from llmppo.envs.guess_number import GuessNumber

class Sleepy(GuessNumber):
    def reset(self, seed=None):
        pathlib.Path("asleep").touch()
        time.sleep(300)
        return super().reset(seed)
"""


def settings(stage: str, **changes: Any) -> str:
    config = variant_config(load_experiment(CONFIG), "main")
    return json.dumps({**stage_settings(config, stage), **changes})


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)
    return found


class Workflow:
    """A working directory; this test process plays the part of Snakemake."""

    def __init__(self, folder: Path, runtime: Path) -> None:
        self.folder = folder
        self.log = folder / "worker.log"
        self.env = {
            **os.environ,
            PARENT: str(os.getpid()),
            WORKER: str(self.log),
            "XDG_RUNTIME_DIR": str(runtime),
            "OMP_WAIT_POLICY": "PASSIVE",
        }

    def popen(self, *arguments: Any, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [LLMPPO, *map(str, arguments)], cwd=self.folder, env={**self.env, **env},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            # Tests in the background would have it ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip

    def run(self, *arguments: Any, status: int = 0, **env: str) -> str:
        child = self.popen(*arguments, **env)
        output, errors = child.communicate(timeout=300)
        assert child.returncode == status, output + errors
        return errors

    def rollout(self, out: str, threads: int = 1, **changes: Any) -> list[Any]:
        return [
            "rollout", "--settings", settings("rollout", threads=threads, **changes), "--base", "base", "--seed", 0,
            "--split", "warmup", "--iteration", 0, "--shard", 0, "--out", out, "--log", f"{out}.log",
        ]  # fmt: skip

    def told(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def workers(self) -> list[int]:
        """Processes of workers that work in this folder."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    here = (entry / "cwd").resolve() == self.folder.resolve()
                    if here and b"llmppo.worker.server" in (entry / "cmdline").read_bytes():
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    def the_worker(self) -> int:
        """The worker itself: its children carry its command line too."""
        return min(self.workers())

    def end(self) -> None:
        for pid in self.workers():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("base") / "model"
    subprocess.run(
        [LLMPPO, "base-model", "--settings", settings("base_model"), "--seed", "0", "--out", out], check=True
    )
    return out


@pytest.fixture
def runtime() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="w"))  # a socket's path must be short
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def workflow(tmp_path: Path, base: Path, runtime: Path) -> Iterator[Workflow]:
    shutil.copytree(base, tmp_path / "base")
    (tmp_path / "sleepy.py").write_text(SLEEPY)
    flow = Workflow(tmp_path, runtime)
    yield flow
    flow.end()


def sleepy() -> dict[str, Any]:
    return {"env": {**json.loads(settings("rollout"))["env"], "factory": "sleepy:Sleepy"}}


def asleep(workflow: Workflow) -> subprocess.Popen[str]:
    """A stage that hangs in a child of the worker."""
    child = workflow.popen(*workflow.rollout("sleepy.parquet", **sleepy()))
    wait_for((workflow.folder / "asleep").exists, 120)
    assert len(workflow.workers()) == 2
    return child


@pytest.mark.parametrize("threads", [1, 2])
def test_a_chain_of_stages_gives_the_bytes_of_cold_ones(workflow: Workflow, threads: int) -> None:
    def chain(name: str, **env: str) -> dict[Path, bytes]:
        workflow.run(*workflow.rollout(f"{name}/warmup.parquet", threads), **env)
        workflow.run(
            "critic-warmup", "--settings", settings("critic_warmup", threads=threads), "--base", "base",
            "--seed", 0, "--out", f"{name}/policy/0000", "--metrics", f"{name}/warmup.json",
            f"{name}/warmup.parquet", **env,
        )  # fmt: skip
        return {
            path.relative_to(workflow.folder / name): path.read_bytes()
            for path in sorted((workflow.folder / name).rglob("*"))
            if path.is_file() and path.suffix in (".parquet", ".safetensors")
        }

    warm, cold = chain("warm"), chain("cold", **{WORKER: OFF})
    assert len(warm) == 6
    assert warm == cold
    for told in ("rollout in process", "critic-warmup in process", "ready for workflow"):
        assert workflow.told().count(told) == 1


def test_the_worker_has_one_thread_with_a_base_model_loaded(workflow: Workflow) -> None:
    workflow.run(*workflow.rollout("a.parquet"))
    assert len(os.listdir(f"/proc/{workflow.the_worker()}/task")) == 1


def test_a_stages_error_and_log_come_through(workflow: Workflow) -> None:
    broken = {"env": {**json.loads(settings("rollout"))["env"], "factory": "nowhere:Nothing"}}
    errors = workflow.run(*workflow.rollout("a.parquet", **broken), status=1)
    assert "no module `nowhere`" in errors
    assert "no module `nowhere`" in (workflow.folder / "a.parquet.log").read_text()
    assert "rollout in process" in workflow.told()


def test_a_killed_stage_kills_its_child(workflow: Workflow) -> None:
    child = asleep(workflow)
    child.kill()
    child.communicate()
    wait_for(lambda: len(workflow.workers()) == 1)
    workflow.run(*workflow.rollout("b.parquet"))


def test_an_interrupt_reaches_the_child(workflow: Workflow) -> None:
    child = asleep(workflow)
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=30)
    assert child.returncode == 130
    assert "interrupted" in errors
    wait_for(lambda: len(workflow.workers()) == 1)


def test_a_child_that_ignores_an_interrupt_is_killed(workflow: Workflow) -> None:
    ignore = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    (workflow.folder / "sleepy.py").write_text(ignore + SLEEPY)
    child = asleep(workflow)
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=60)
    assert child.returncode == 130
    wait_for(lambda: len(workflow.workers()) == 1)


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (signal.SIGKILL, "killed by SIGKILL. If nobody did, memory ran out"),
        (signal.SIGSEGV, r"native code crashed \(SIGSEGV\); the log has"),
        (signal.SIGUSR1, "killed by SIGUSR1$"),
    ],
)
def test_a_child_that_is_killed_fails_its_stage(workflow: Workflow, sent: signal.Signals, said: str) -> None:
    child = asleep(workflow)
    os.kill(max(workflow.workers()), sent)
    _, errors = child.communicate(timeout=30)
    assert child.returncode == 128 + sent
    assert re.search(said, errors, re.MULTILINE)


def test_a_killed_worker_takes_its_children_along_and_is_replaced(workflow: Workflow) -> None:
    workflow.run(*workflow.rollout("a.parquet"))
    os.kill(workflow.the_worker(), signal.SIGKILL)
    wait_for(lambda: workflow.workers() == [])
    assert list((Path(workflow.env["XDG_RUNTIME_DIR"]) / "llmppo").glob("*.sock"))  # a stale socket
    workflow.run(*workflow.rollout("b.parquet"))
    assert workflow.told().count("ready for workflow") == 2
    assert (workflow.folder / "a.parquet").read_bytes() == (workflow.folder / "b.parquet").read_bytes()


def test_a_worker_killed_in_the_middle_leaves_the_stage_to_run_cold(workflow: Workflow) -> None:
    (workflow.folder / "sleepy.py").write_text(SLEEPY.replace("300", "2"))
    child = asleep(workflow)
    os.kill(workflow.the_worker(), signal.SIGKILL)
    _, errors = child.communicate(timeout=120)
    assert child.returncode == 0, errors
    assert (workflow.folder / "sleepy.parquet").is_file()


def test_a_worker_killed_while_it_starts_is_replaced(workflow: Workflow) -> None:
    child = workflow.popen(*workflow.rollout("a.parquet"))
    os.kill(wait_for(workflow.workers)[0], signal.SIGKILL)
    child.communicate(timeout=120)
    assert child.returncode == 0  # it ran cold
    workflow.run(*workflow.rollout("b.parquet"))
    assert "rollout in process" in workflow.told()


def test_a_worker_ends_with_its_workflow_while_it_starts(tmp_path: Path) -> None:
    ended = subprocess.Popen(["sleep", "0.2"])
    worker = subprocess.run(
        [sys.executable, "-P", "-m", "llmppo.worker.server", str(tmp_path / "socket"), str(ended.pid)],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert "ready" not in worker.stderr


def test_a_worker_that_hangs_is_left_alone(workflow: Workflow, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmppo.worker import client

    workflow.run(*workflow.rollout("a.parquet"))
    for name, value in workflow.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(PARENT)
    monkeypatch.chdir(workflow.folder)
    monkeypatch.setattr(client, "ACCEPT_S", 0.5)
    (socket,) = (Path(workflow.env["XDG_RUNTIME_DIR"]) / "llmppo").glob("*.sock")
    monkeypatch.setattr(client, "find_place", lambda _: place_module.Place(socket.parent, socket.stem))
    worker = workflow.the_worker()
    os.kill(worker, signal.SIGSTOP)
    assert client.delegate(os.getpid(), None, ["--version"]) is None
    os.kill(worker, signal.SIGCONT)
    assert client.delegate(os.getpid(), None, ["--version"]) == 0


def test_a_worker_that_can_not_start_is_tried_once(workflow: Workflow) -> None:
    (workflow.folder / "torch.py").write_text("raise ImportError('broken')")
    broken = {"PYTHONPATH": str(workflow.folder)}
    config = settings("base_model", base_model={"kind": "pretrained", "path": "absent"})
    for _ in range(2):
        workflow.run("base-model", "--settings", config, "--seed", 0, "--out", "new", status=1, **broken)
    assert workflow.told().count("ImportError: broken") == 1


def test_two_workflows_have_two_workers(workflow: Workflow) -> None:
    workflow.run(*workflow.rollout("a.parquet"))
    command = " ".join(f"'{part}'" for part in [LLMPPO, *workflow.rollout("b.parquet")])
    script = f"{PARENT}=$$ {command}; ls '{workflow.env['XDG_RUNTIME_DIR']}/llmppo'"
    done = subprocess.run(
        ["sh", "-c", script],
        cwd=workflow.folder,
        env=workflow.env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.count(".sock") == 2
    # The second one's workflow, the shell, has ended, and so does it.
    wait_for(lambda: len(workflow.workers()) == 1)
    wait_for(lambda: "ending: the workflow ended" in workflow.told())
    assert len(list((Path(workflow.env["XDG_RUNTIME_DIR"]) / "llmppo").glob("*.sock"))) == 1


def test_a_changed_base_model_is_loaded_again(workflow: Workflow, base: Path) -> None:
    workflow.run(*workflow.rollout("a.parquet"))
    shutil.rmtree(workflow.folder / "base")
    config = settings("base_model")
    workflow.run("base-model", "--settings", config, "--seed", 1, "--out", "base")
    workflow.run(*workflow.rollout("b.parquet"))
    workflow.run(*workflow.rollout("c.parquet"), **{WORKER: OFF})
    a, b, c = ((workflow.folder / f"{name}.parquet").read_bytes() for name in "abc")
    assert b == c != a


@pytest.mark.parametrize("trouble", ["absent", "public", "long"])
def test_without_a_private_folder_for_the_socket_stages_run_cold(
    workflow: Workflow, runtime: Path, trouble: str
) -> None:
    folder = runtime
    if trouble == "absent":
        folder = runtime / "absent"
    elif trouble == "long":
        folder = runtime / ("x" * 100)
        folder.mkdir()
    else:
        (runtime / "llmppo").mkdir()
        (runtime / "llmppo").chmod(0o755)
    workflow.run(*workflow.rollout("a.parquet"), XDG_RUNTIME_DIR=str(folder))
    assert (workflow.folder / "a.parquet").is_file()
    assert workflow.workers() == []
    assert workflow.told() == ""


def test_a_stage_run_by_hand_starts_no_worker(workflow: Workflow) -> None:
    del workflow.env[PARENT]
    workflow.run(*workflow.rollout("a.parquet"))
    assert workflow.told() == ""


def test_what_differs_makes_another_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    me = os.getpid()
    key = key_of(me, {"A": "1"})
    assert key_of(me, {"A": "1", "OMP_NUM_THREADS": "4", PARENT: "7", "SHLVL": "2"}) == key
    assert key_of(me, {"A": "2"}) != key
    assert key_of(os.getppid(), {"A": "1"}) != key
    package = tmp_path / "llmppo"
    package.mkdir()
    source = package / "__init__.py"
    source.write_text("a = 1")
    monkeypatch.setattr(place_module.llmppo, "__file__", str(source))
    first = key_of(me, {})
    source.write_text("a = 22")
    assert key_of(me, {}) != first
    monkeypatch.chdir(tmp_path)
    assert key_of(me, {}) != first


def test_the_socket_lies_where_only_this_user_can_open_it(
    monkeypatch: pytest.MonkeyPatch, runtime: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    folder = private_folder()
    assert folder is not None
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    folder.symlink_to(runtime)
    assert private_folder() is None
    assert find_place(os.getpid()) is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be several users")
def test_a_folder_of_another_user_is_not_taken(monkeypatch: pytest.MonkeyPatch, runtime: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    folder = private_folder()
    assert folder is not None
    os.chown(folder, NOBODY, NOBODY)
    assert private_folder() is None
    os.chown(folder, 0, 0)
    for mode in (0o755, 0o770, 0o701):
        folder.chmod(mode)
        assert private_folder() is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be several users")
def test_a_request_of_another_user_is_refused(runtime: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Even where the folder lets it through, the kernel says who asks."""
    worker = Worker(runtime / "a.sock", os.getpid())
    worker.listen()
    runtime.chmod(0o755)
    (runtime / "a.sock").chmod(0o777)
    code = (
        "import socket, sys; from llmppo.worker.messages import receive, send; s = socket.socket(socket.AF_UNIX); "
        "s.connect(sys.argv[1])\n"
        "request = {'arguments': ['--version'], 'environment': {}, 'umask': 0, 'base': None}\n"
        "try: send(s, request, [0, 1, 2]); print(receive(s))\nexcept (EOFError, OSError): print('refused')"
    )

    # Started as root, since nobody may not read the code; it is another user before it connects.
    start = f"import os; os.setgroups([]); import llmppo.worker.messages; os.setgid({NOBODY}); os.setuid({NOBODY}); "
    child = subprocess.Popen(
        [sys.executable, "-c", start + code, runtime / "a.sock"], stdout=subprocess.PIPE, text=True
    )
    worker.accept()
    assert child.communicate(timeout=60)[0] == "refused\n"
    assert worker.jobs == []
    assert f"user {NOBODY} is not ours" in capfd.readouterr().err
    worker.end()


@pytest.mark.parametrize("token", [None, "", "a" * 43])
def test_a_request_without_the_token_is_refused(
    runtime: Path, capfd: pytest.CaptureFixture[str], token: str | None
) -> None:
    worker = Worker(runtime / "a.sock", os.getpid())
    worker.listen()
    assert (runtime / "a.token").stat().st_mode & 0o777 == 0o600
    request = {"arguments": ["--version"], "environment": {}, "umask": 0, "base": None}
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(runtime / "a.sock"))
        send(client, request if token is None else {**request, "token": token}, [0, 1, 2])
        worker.accept()
        with pytest.raises(EOFError):
            receive(client)
    assert worker.jobs == []
    assert "without this worker's token" in capfd.readouterr().err
    worker.end()
    assert not list(runtime.iterdir())


@pytest.mark.parametrize(
    ("stage", "config", "worker", "expected"),
    [
        ("rollout", "{}", "log", True),
        ("rollout", '{"device": "cpu"}', "log", True),
        ("rollout", '{"device": "cuda"}', "log", False),
        ("rollout", "config.yaml", "log", False),
        ("report", "{}", "log", False),
        ("rollout", "{}", OFF, False),
        ("rollout", "{}", "", False),
    ],
)
def test_when_a_worker_is_asked(
    monkeypatch: pytest.MonkeyPatch, stage: str, config: str, worker: str, expected: bool
) -> None:
    monkeypatch.setenv(WORKER, worker)
    assert offered(stage, config) is expected
