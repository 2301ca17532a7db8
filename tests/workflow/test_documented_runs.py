"""Every `llmppo`, `snakemake` and `python` command that README, docs and config/README.md show, run in a folder like a clone.

The experiments that the pages begin with are cut down to seconds and run first; what else is shown works on their
results. What would train for minutes, or on a cluster, is planned with `--dry-run`. A command that nothing here
knows how to run fails, so that none goes unrun.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import click
import duckdb
import pytest
import yaml
from shown import COMMANDS, PLACEHOLDER, README, REPOSITORY, Shown, blocks, write_examples
from workflow_runs import s3_server

from llmppo.cli import main
from llmppo.experiment import merge
from llmppo.testing.servers import free_port, wait_for

pytestmark = [pytest.mark.workflow, pytest.mark.slow]

LINKED = ("Snakefile", "workflow", "profiles", "notebooks", "benchmarks", "config/experiments", "config/data")
DEFAULT = "config/config.yaml"
GAME = {
    "seeds": [0],
    "iterations": 1,
    "base_model": {"warm_start": {"steps": 20}},
    "rollout": {"shard_size": 8},
    "ppo": {"batch_size": 8, "mini_batch_size": 4, "critic_warmup_steps": 1, "critic_warmup_epochs": 1},
    "evaluation": {"every": 1, "episodes": 8},
}
UNTRACKED = {
    "tracking": {"mlflow": False}
}  # for `llmppo ui` one with it is enough, and it takes long to import
SMALL = {  # what is merged into the experiments, so that they take seconds
    DEFAULT: GAME,
    "study.yaml": GAME | UNTRACKED,
    "reverse.yaml": {"iterations": 1, "evaluation": {"every": 1, "episodes": 8}} | UNTRACKED,
}
FIRST = ("llmppo run", "llmppo run --config study.yaml")

# What a reader fills in, and seeds that are as many more beside one as those shown beside three.
FILLED = {
    "config/experiments/NAME.yaml": "config/experiments/smollm2-compare.yaml",
    "ablation-NAME": "ablation-credit",
    "results/NAME": "results/guess-number",
    "my.yaml": "study.yaml",
    "llmppo validate FILE": "llmppo validate study.yaml",
    "--report FILE.html": "--report results/study.html",
    "s3://BUCKET/FOLDER": "s3://bucket/folder",
    "seeds=[0,1,2,3,4]": "seeds=[0,1]",
}
NEEDS = {  # packages that are not in every environment, by what asks for them
    "slurm": "snakemake_executor_plugin_slurm",
    "reasoning-gym": "reasoning_gym",
    "textarena": "textarena",
}
AS_SHOWN = {"run", "validate", "status", "verify", "adopt", "show", "replay", "schema"}
NOT_RUN = {  # by their beginning, and why
    "python benchmarks/learn_step.py": "measures, beside a peer's environment",
    "make": "installs, or runs this suite; `make --dry-run` in test_documented_commands.py",
    "pip": "installs",
    "conda": "installs",
    "docker": "needs a daemon",
    "kubectl": "needs a cluster",
    "vllm": "as a run starts it: test_engines.py",
    "pytest": "this suite",
    "export": "of the shell",
    ".": "of the shell",
}


def complete(command: Shown) -> bool:
    """Whether it can be typed as it stands and is more than a name: code within a sentence may be only that."""
    program, *words = command.words
    if command.whole or program != "llmppo" or "--help" in words:
        return True
    longer = any(shown.whole and shown.text.startswith(f"{command.text} ") for shown in COMMANDS)
    if words[1:] == ["…"] or (len(words) == 1 and longer):
        return False
    try:
        main.commands[words[0]].make_context(words[0], words[1:])
    except (click.MissingParameter, click.BadOptionUsage):
        return False
    return True


def filled(command: Shown) -> tuple[str, ...]:
    text = shlex.join(command.words)
    for placeholder, value in FILLED.items():
        text = text.replace(placeholder, value)
    return tuple(shlex.split(text))


def left_out(command: Shown) -> bool:
    text = " ".join(command.words)
    return any(text == beginning or text.startswith(f"{beginning} ") for beginning in NOT_RUN)


RUNS = list(dict.fromkeys(filled(shown) for shown in COMMANDS if not left_out(shown) and complete(shown)))


def given(words: tuple[str, ...], option: str) -> list[str]:
    """Values of an option, wherever it stands."""
    return [value for name, value in pairwise(words) if name == option]


def is_long(words: tuple[str, ...]) -> bool:
    """Whether a run is of an experiment in full size, on a cluster, or would train a small one anew or on.

    Other tests run notebooks (test_notebooks.py) and write results elsewhere (test_tasks.py).
    """
    if words[:2] != ("llmppo", "run") and words[0] != "snakemake":
        return False
    configs = given(words, "--config" if words[0] == "llmppo" else "--configfile")
    profiles = given(words, "--profile") + given(words, "--workflow-profile")
    changes = given(words, "--set")
    small = set(configs) <= SMALL.keys() and set(changes) <= set(FILLED.values())
    elsewhere = [word for word in words if word in ("notebooks", "--results") or word.startswith("results=")]
    return bool(profiles or elsewhere) or not small


def environment(more: Mapping[str, str] = {}) -> dict[str, str]:
    """As in an activated environment."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", **more}


def run(words: tuple[str, ...], folder: Path, more: Mapping[str, str] = {}) -> str:
    """What a command says; AssertionError where it fails."""
    done = subprocess.run(
        words, cwd=folder, env=environment(more), capture_output=True, text=True, timeout=600
    )
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    assert "Traceback" not in told, told
    return told


def serve(words: tuple[str, ...], folder: Path) -> None:
    """Start a server, wait until it answers, and stop it."""
    port = free_port()
    few = {"MLFLOW_WORKERS": "1", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # each imports MLflow anew
    server = subprocess.Popen(
        [*words, "--port", str(port)],
        cwd=folder, env=environment(few), start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_for(f"http://127.0.0.1:{port}/health")
        assert server.poll() is None
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a clone has and the files that pages show; its small experiments have run."""
    folder = tmp_path_factory.mktemp("clone")
    (folder / "config").mkdir()
    for part in LINKED:
        (folder / part).symlink_to(REPOSITORY / part)
    write_examples(folder)
    (folder / DEFAULT).write_bytes((REPOSITORY / DEFAULT).read_bytes())
    for name, changes in SMALL.items():
        config = merge(yaml.safe_load((folder / name).read_text()), changes)
        (folder / name).write_text(yaml.safe_dump(config, sort_keys=False))
    for text in FIRST:
        run(tuple(text.split()), folder)
    return folder


def test_enough_is_run() -> None:
    assert {tuple(text.split()) for text in FIRST} <= set(RUNS)
    assert {words[1] for words in RUNS if words[0] == "llmppo"} >= {*AS_SHOWN, "ui"}
    assert sum(not is_long(words) for words in RUNS) > 20


@pytest.mark.parametrize("words", RUNS, ids=shlex.join)
def test_a_shown_command_runs(words: tuple[str, ...], clone: Path) -> None:
    program, name = words[:2]
    for part, package in NEEDS.items():
        if any(part in word for word in words) and find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    assert not any(map(PLACEHOLDER.search, words)), "no value for a placeholder: add one to FILLED"
    assert program in ("llmppo", "snakemake", "python"), f"nothing here knows how to run {program}"
    if (program, name) == ("llmppo", "ui"):
        serve(words, clone)
        return
    assert program != "llmppo" or name in AS_SHOWN or "--help" in words, (
        f"nothing here knows how to run {name}"
    )
    with s3_server() if "s3://bucket/folder" in words else nullcontext({}) as store:
        told = run((*words, "--dry-run") if is_long(words) else words, clone, store)
    for file in re.findall(r"^(?:report|figure|export) +(results/\S+)$", told, re.MULTILINE) + given(
        words, "--report"
    ):
        assert (clone / file).exists(), told


def test_the_queries_run_on_the_results(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(clone)
    (script,) = blocks(README, "sql")
    last = max(Path("results/guess-number/main/seed-0/evaluations").iterdir()).name
    for query in re.sub(r"(?<=evaluations/)\d{4}", last, script).split(";"):
        if query.strip():
            assert duckdb.sql(query).fetchall(), query


def test_the_export_loads(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(clone)
    (script,) = [block for block in blocks(README, "python") if "from_pretrained(f" in block]
    exec(script, {})
