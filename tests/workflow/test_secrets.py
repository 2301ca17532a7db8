"""Secrets of the environment don't get into anything that a run writes or says, nor does a password of an address."""

import base64
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from workflow_runs import REPOSITORY

pytestmark = pytest.mark.workflow

NAMES = (
    "HF_TOKEN", "WANDB_API_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "MLFLOW_TRACKING_PASSWORD",
    "VLLM_API_KEY", "MY_JUDGE_API_KEY",
)  # fmt: skip
SECRETS = {name: f"hidden-{number}-{name.lower()[::-1]}" for number, name in enumerate(NAMES)}
LOGIN = base64.b64encode(f"me:{SECRETS['MLFLOW_TRACKING_PASSWORD']}".encode()).decode()
# A game whose judge is asked with a key, and says it when it refuses.
TALKATIVE = """
import os
from llmppo.envs.guess_number import GuessNumber

class Judged(GuessNumber):
    calls = 0
    def step(self, text):
        Judged.calls += 1
        if Judged.calls == 3:
            raise RuntimeError(f"401 from https://me:{os.environ['WANDB_API_KEY']}@judge?api_key={os.environ['MY_JUDGE_API_KEY']}")
        return super().step(text)
"""


class Tracker(BaseHTTPRequestHandler):
    """Refuses everybody, and tells them their password."""

    def refuse(self) -> None:
        login = self.headers.get("Authorization", "").removeprefix("Basic ")
        self.server.logins.append(login)  # type: ignore[attr-defined]
        message = f"no entry for {base64.b64decode(login).decode()}"
        text = json.dumps({"error_code": "PERMISSION_DENIED", "message": message}).encode()
        self.send_response(403)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = refuse

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def tracker() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Tracker)
    server.logins = []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def llmppo(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).with_name("llmppo")), *arguments], cwd=folder, text=True, timeout=300,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, **SECRETS, "MLFLOW_TRACKING_USERNAME": "me"},
    )  # fmt: skip


def texts(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Every file below a folder as far as it can be read: Parquet is compressed."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield str(path), path.read_bytes()
            if path.suffix == ".parquet":
                table = pq.read_table(path)
                yield str(path), f"{table.to_pylist()} {table.schema.metadata}".encode()


def leaks(folder: Path, said: str) -> list[tuple[str, str]]:
    hidden = {**SECRETS, "login": LOGIN}
    everything = [*texts(folder), ("the terminal", said.encode())]
    return [
        (name, where)
        for where, text in everything
        for name, value in hidden.items()
        if value.encode() in text
    ]


def test_a_run_writes_no_secret(tmp_path: Path) -> None:
    values = yaml.safe_load((REPOSITORY / "config" / "test" / "tiny.yaml").read_text())
    values |= {"iterations": 1, "seeds": [0], "tracking": {"mlflow": True}}
    values["env"] = {**values["env"], "factory": "talkative:Judged", "retries": 0, "max_failed_frac": 1.0}
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(values))
    (tmp_path / "talkative.py").write_text(TALKATIVE)
    done = llmppo(tmp_path, "run", "--config", "experiment.yaml", "--cores", "1")
    assert done.returncode == 0, done.stdout
    chain = tmp_path / "results" / values["name"] / "main" / "seed-0"
    failures = [
        row["failure"] for file in chain.rglob("*.parquet") if "advantages" not in file.name
        for row in pq.read_table(file).to_pylist() if row["failure"]
    ]  # fmt: skip
    assert failures
    assert all("401 from https://me:***@judge?api_key=***" in failure for failure in failures)
    with tracker() as server:
        refused = llmppo(
            tmp_path, "track", "--settings", "experiment.yaml", "--experiment", "e", "--variant", "main", "--seed", "0",
            "--run-dir", str(chain), "--uri", f"http://127.0.0.1:{server.server_port}", "--out", str(chain / "tracking.json"),
            "--log", str(chain / "logs" / "track.log"),
        )  # fmt: skip
        assert LOGIN in server.logins  # type: ignore[attr-defined]
    assert "no entry for me:***" in refused.stdout
    assert "no entry for me:***" in (chain / "tracking.json").read_text()
    assert "no entry for me:***" in (chain / "mlflow.html").read_text()
    assert leaks(tmp_path, done.stdout + refused.stdout) == []


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"tracking": {"uri": "https://me:hidden-in-uri@host"}}, "tracking.uri"),
        ({"tracking": {"uri": "postgresql://me:hidden-in-uri@host/db"}}, "tracking.uri"),
        ({"tracking": {"uri": "postgresql://host/db?user=me&password=hidden-in-uri"}}, "tracking.uri"),
        (
            {"rollout": {"vllm": {"mode": "server", "urls": ["http://me:hidden-in-uri@host:8000"]}}},
            "rollout.vllm",
        ),
        (
            {"env": {"kwargs": {"key": SECRETS["MY_JUDGE_API_KEY"]}}},
            "env.kwargs.key: .*variable MY_JUDGE_API_KEY",
        ),
    ],
    ids=["tracker", "database", "argument", "vllm", "copied from the environment"],
)
def test_a_secret_in_the_config_is_refused_untold(tmp_path: Path, section: dict[str, Any], key: str) -> None:
    text = yaml.safe_dump({"name": "x", "base_model": {"kind": "tiny"}, **section})
    (tmp_path / "experiment.yaml").write_text(text)
    done = llmppo(tmp_path, "run", "--config", "experiment.yaml")
    assert done.returncode == 1
    assert re.search(key, done.stdout)
    assert "in the environment" in done.stdout or "read the variable" in done.stdout
    assert "hidden-" not in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["experiment.yaml"]
