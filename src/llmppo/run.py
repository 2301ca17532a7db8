"""`llmppo run`: a lock on the results folder, Snakemake as a child, progress, and what to look at next.

After any kind of death the same command goes on: the kernel drops the lock and kills the stages, and
Snakemake redoes only what is incomplete.
"""

import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import yaml

from llmppo.errors import NO_ROOM, ConfigError, LlmppoError
from llmppo.experiment import merge, parse_experiment, read_values, twins
from llmppo.files import write_text
from llmppo.layout import ui_command
from llmppo.makers import note_end
from llmppo.ownership import HELD, check_home, hold, near, refusal, settle
from llmppo.plain_values import read_yaml
from llmppo.plan import Plan
from llmppo.process import die_with, prefer_own_commands
from llmppo.progress import Progress, display
from llmppo.snakelog import SnakemakeLog

REFUSED = 73  # sysexits' EX_CANTCREAT: another run holds the results
POLL_S = 0.5
GRACE_S = 5  # from a signal to the kill
TAIL_LINES = 30
FULL_BYTES = 16 * 2**20
DRY_RUN = frozenset(("-n", "-np", "--dry-run", "--dryrun"))
DEFAULT_PROFILE = "default"
LOCAL = "local"  # Snakemake's executor for this machine
PROFILE_FILES = ("profile.yaml", "config.yaml")  # the names that Snakemake takes


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def change(values: dict[str, Any], setting: str) -> dict[str, Any]:
    """Config values with one `key.path=value` applied; the value is YAML. Raises ConfigError."""
    key, separator, text = setting.partition("=")
    if not separator or not key:
        raise ConfigError(f"--set {setting}: expected KEY=VALUE, such as ppo.clip_coef=0.1")
    value = read_yaml(text, f"--set {setting}: the value")
    parts = key.split(".")
    if value == {}:  # merging nothing would change nothing: it empties the section
        section: Any = values
        for part in parts[:-1]:
            section = section.get(part) if isinstance(section, dict) else None
        if isinstance(section, dict):
            section[parts[-1]] = {}
        return values
    for part in reversed(parts):
        value = {part: value}
    return merge(values, value)


def configure(config: Path, results: Path | None, changes: Sequence[str]) -> tuple[dict[str, Any], Plan]:
    """The config's values with all changes, and its validated plan. Raises ConfigError."""
    values = read_values(config)
    for setting in changes:
        values = change(values, setting)
    if results is not None:
        values = {**values, "results": str(results)}
    return values, Plan(parse_experiment(values, str(config)))


def find_snakefile() -> Path:
    """The Snakefile of the working directory, else that of the checkout this package runs from."""
    for folder in (Path(), Path(__file__).resolve().parents[2]):
        if (folder / "Snakefile").is_file():
            return folder / "Snakefile"
    raise LlmppoError("there is no Snakefile here; run this in a clone of the repository")


def snakemake_command(snakefile: Path, cores: str | None = "1") -> list[str]:
    """Snakemake of this environment on the workflow; `cores` None leaves them to the profile."""
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(snakefile)]
    return command if cores is None else [*command, "--cores", cores]


def find_profile(snakefile: Path, name: str) -> Path:
    """The file of a profile: a folder beside the Snakefile's `profiles/default`, or any folder. Raises ConfigError."""
    shipped = snakefile.parent / "profiles"
    for folder in (shipped / name, Path(name)):
        for file in PROFILE_FILES:
            if (folder / file).is_file():
                return folder / file
    known = ", ".join(sorted(path.name for path in shipped.glob("*/")))
    raise ConfigError(
        f"--profile {name}: there is no such profile; name one of {known}, or a folder with a {PROFILE_FILES[0]}"
    )


def profile_arguments(profile: Path) -> list[str]:
    """A profile as Snakemake reads it, as arguments, without its logger: the log is read by a program.

    Raises ConfigError where the executor's plugin is not installed.
    """
    from snakemake.profiles import ProfileConfigFileParser

    with open(profile, encoding="utf-8") as file:
        values = ProfileConfigFileParser().parse(file)
    if "default-storage-provider" in values:
        raise ConfigError(
            f"{profile}: `llmppo run` reads results as files, which an object store hasn't; plain Snakemake does the work: "
            f"snakemake --workflow-profile {profile.parent}"
        )
    plugin = f"snakemake-executor-plugin-{values.get('executor', LOCAL)}"
    if values.get("executor", LOCAL) != LOCAL and find_spec(plugin.replace("-", "_")) is None:
        raise ConfigError(
            f"{profile}: {plugin} is not installed; `make {profile.parent.name}` does it for a profile of this repository"
        )
    arguments = ["--workflow-profile", "none"]
    for name, value in values.items():
        if name == "logger" or value == "False":
            continue
        arguments.append(f"--{name}")
        if isinstance(value, list):
            arguments += map(str, value)
        elif value != "True":
            arguments.append(value)
    return arguments


def _as_child(parent: int) -> None:
    """In Snakemake's process before it starts: die with this one, and hear the interrupt that `Stop` sends.

    A shell lets what it runs in the background ignore interrupts, and children inherit that.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with(parent)


class Stop:
    """What a signal to `llmppo run` does: Snakemake and its stages are interrupted, then killed if they linger.

    Every signal interrupts: Snakemake's own handling of SIGTERM can deadlock (its handler takes a lock that the
    interrupted thread may hold), and a cluster that sends SIGTERM kills soon after. Nothing half-written has its
    final name, so what is lost is the stages at work.
    """

    SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)

    def __init__(self, group: int) -> None:
        self.group = group  # the process group of Snakemake and its stages
        self.received: int | None = None  # the first signal
        self.deadline = math.inf

    def __call__(self, number: int, frame: object) -> None:
        if self.received is None:
            _say("\nstopping; the same command goes on from here")
            self.received = number
            self.deadline = time.monotonic() + GRACE_S
        self.send(signal.SIGINT)

    def send(self, number: int) -> None:
        with suppress(ProcessLookupError):  # it just ended
            os.killpg(self.group, number)

    def enforce(self) -> None:
        if time.monotonic() > self.deadline:
            self.send(signal.SIGKILL)


def follow(command: list[str], plan: Plan, log: Path, lock: int) -> tuple[int, SnakemakeLog]:
    """Run Snakemake to its end, showing progress and passing signals on; its exit status and its log.

    After a signal the status is 128 + its number, whatever Snakemake made of it.
    """
    reader = SnakemakeLog(log)
    progress = Progress(plan, reader)
    with open(log, "wb") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # A group of its own, so that a Ctrl-C reaches Snakemake once and from here. It keeps the
            # lock's descriptor: the lock lasts as long as anything may still write.
            start_new_session=True,
            pass_fds=[lock],
            preexec_fn=partial(_as_child, os.getpid()),
        )
    stop = Stop(child.pid)
    previous = {number: signal.signal(number, stop) for number in Stop.SIGNALS}
    try:
        with display(progress) as shown:
            while True:
                try:
                    status = child.wait(timeout=POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    stop.enforce()
                    shown.update()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if status and stop.received is not None:
        status = -stop.received
        reader.failed.clear()  # stopped, not failed
    return (status if status >= 0 else 128 - status), reader


def full_disk(folder: str) -> str | None:
    """That the disk of a folder is as good as full, in words: then the logs have no room to say it."""
    free = shutil.disk_usage(folder).free
    if free > FULL_BYTES:
        return None
    return f"error: the disk of {os.path.abspath(folder)} has {free / 2**20:.1f} MiB left; {NO_ROOM}, and the same command goes on"


def explain_failure(reader: SnakemakeLog) -> None:
    """The failed rules and the ends of their logs; without a failed rule the end of Snakemake's own."""
    for job in reader.failed:
        _say(f"\nfailed: {job}")
        if job.log is not None and job.log.is_file():
            _say(tail(job.log))
            _say(f"whole log: {job.log}")
    if not reader.failed:
        _say(tail(reader.path))
    _say(f"Snakemake's log: {reader.path}")


def tail(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(f"  {line}" for line in lines[-TAIL_LINES:])


def closing_words(plan: Plan) -> str:
    """Where the results are and how to look at them."""
    layout = plan.layout
    lines = [f"report    {layout.report}", f"figure    {layout.figure}"]
    lines += [f"export    {layout.export(*chain)}" for chain in plan.chains]
    if plan.experiment.tracking.mlflow:
        lines.append(f"tracker   {ui_command(plan.tracking_uri)}")
    return "\n".join(lines)


def refuse_configs(targets: Sequence[str], results: str) -> None:
    """Raise LlmppoError for an experiment's config that is given as a target of Snakemake."""
    for option, target in pairwise(("", *targets)):
        named = target.endswith((".yaml", ".yml")) and not option.startswith("--configfile")
        if named and not Path(near(target)).is_relative_to(results):
            raise LlmppoError(f"{target} is no file of {results}; a config is given as --config {target}")


def run_experiment(
    values: dict[str, Any],
    plan: Plan,
    cores: str | None,
    profile: str = DEFAULT_PROFILE,
    snakemake_args: Sequence[str] = (),
) -> int:
    """Run an experiment, its config's values and their plan, to its end; returns the exit status.

    Without `cores` the default profile has all of this machine, another one what it says itself: Snakemake would
    hold the threads of a cluster's jobs to the cores given here. Among `snakemake_args` may be targets, so before
    them comes an option that takes no values.
    """
    refuse_configs(snakemake_args, plan.layout.results)
    snakefile = find_snakefile()
    profile_file = find_profile(snakefile, profile)
    settings = profile_arguments(profile_file)
    command = snakemake_command(snakefile, cores or ("all" if profile == DEFAULT_PROFILE else None))
    check_home(plan.layout.results)
    folder = Path(plan.layout.root) / "logs"
    stamp = time.strftime("%Y%m%d-%H%M%S")
    copy = folder / f"snakemake-{stamp}.yaml"
    if DRY_RUN.intersection(snakemake_args):
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            yaml.safe_dump(values, file, sort_keys=False)
            file.flush()
            return subprocess.call(
                [
                    *command, "--configfile", file.name, "--workflow-profile", str(profile_file.parent),
                    "--nolock", *snakemake_args,
                ]
            )  # fmt: skip
    with hold(Path(plan.layout.lock)) as lock:
        if lock is None:
            _say(f"llmppo run: {refusal(plan.experiment.results, plan.layout.lock)}")
            return REFUSED
        settle(plan.layout.results)
        os.environ[HELD] = plan.layout.lock
        write_text(copy, yaml.safe_dump(values, sort_keys=False))
        log = copy.with_suffix(".log")
        _say("\n".join([plan.summary(), *twins(plan.variants), f"Snakemake's log: {log}"]))
        status, reader = follow(
            [
                *command, "--configfile", str(copy), *settings, "--nolock", *snakemake_args,
            ],
            plan, log, lock,
        )  # fmt: skip
        if status > 128 and not reader.failed:
            _say(f"stopped. Snakemake's log: {log}")
        elif status:
            explain_failure(reader)
            for fault in {full_disk(folder) for folder in (".", plan.layout.results)} - {None}:
                _say(f"llmppo run: {fault}")
        else:
            if not snakemake_args:
                note_end(plan)
            if not reader.total:
                _say("all of it was done before; nothing ran")
            click.echo(closing_words(plan))
        return status


def serve_tracker(config: Path, results: Path | None, host: str, port: int) -> None:
    """Replace this process by the MLflow server on the results. Raises LlmppoError."""
    _, plan = configure(config, results, ())
    if plan.experiment.tracking.uri is None and not Path(plan.layout.mlflow_database).is_file():
        raise LlmppoError(f"{plan.layout.mlflow_database} does not exist; `llmppo run` writes it")
    if not plan.tracking_uri.startswith("sqlite:"):
        raise LlmppoError(f"the tracker of this config is a server of its own: {plan.tracking_uri}")
    prefer_own_commands()
    _say(f"MLflow UI on http://{host}:{port} (Ctrl-C ends it)")
    os.execv(
        sys.executable,
        [
            sys.executable, "-m", "mlflow", "server", "--backend-store-uri", plan.tracking_uri,
            "--host", host, "--port", str(port), "--workers", "1",  # of several, uvicorn ends those that take five seconds to start
        ],
    )  # fmt: skip
