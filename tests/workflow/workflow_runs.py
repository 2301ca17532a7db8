"""Helpers of the workflow tests: a checkout with its own environment, and Snakemake's plans as sets of jobs."""

import hashlib
import os
import re
import stat
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmppo.testing.servers import free_port, wait_for

REPOSITORY = Path(__file__).resolve().parents[2]
RULE = re.compile(r"^(?:local)?(?:rule|checkpoint) (\w+):$")
WILDCARDS = re.compile(r"^ +wildcards: (.*)$")

SMOKE = REPOSITORY / "config" / "test" / "smoke.yaml"  # three iterations
FASTER = ("--set", "ppo.lr_actor=0.01", "--set", "ppo.lr_critic=0.01")
FASTER_NAME = "lr_actor-0.01_lr_critic-0.01"
S3_KEYS = {"ACCESS_KEY": "somebody", "SECRET_KEY": "something"}


@dataclass
class Bench:
    """A working directory with a config, and an environment whose `llmppo` has fake stages."""

    folder: Path
    python: Path
    config: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def config_file(self) -> Path:
        return self.folder / "experiment.yaml"

    @property
    def results(self) -> Path:
        return self.folder / "results"

    def write_config(self, **changes: Any) -> None:
        """Write the config with top-level sections updated."""
        values = {
            name: {**self.config.get(name, {}), **changes[name]}
            if isinstance(changes.get(name), dict)
            else value
            for name, value in {**self.config, **changes}.items()
        }
        self.config_file.write_text(yaml.safe_dump(values))

    def env(self, **more: str) -> dict[str, str]:
        # A worker would run the real stages.
        return {**os.environ, "LLMPPO_WORKER": "off", **self.environment, **more}

    def command(self, *arguments: str) -> list[str]:
        return [
            str(self.python), "-m", "snakemake", "--snakefile", str(REPOSITORY / "Snakefile"),
            "--configfile", str(self.config_file), *arguments,
        ]  # fmt: skip

    def snakemake(self, *arguments: str, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.command(*arguments), cwd=self.folder, env=self.env(**env), capture_output=True, text=True
        )
        if check and done.returncode:
            raise AssertionError(done.stdout + done.stderr)
        return done

    def llmppo(self, command: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """A command of `llmppo` on the config."""
        done = subprocess.run(
            [str(self.python.with_name("llmppo")), command, "--config", str(self.config_file), *arguments],
            cwd=self.folder, env=self.env(), capture_output=True, text=True,
        )  # fmt: skip
        if check and done.returncode:
            raise AssertionError(done.stdout + done.stderr)
        return done

    def run(self, cores: int = 2, **env: str) -> None:
        self.snakemake("--cores", str(cores), **env)

    def planned(self, *arguments: str) -> set[str]:
        """Jobs of a dry run as `rule` or `rule wildcards`, without the target rule."""
        # The plain logger names every job; the profile's one only counts them.
        output = self.snakemake("-n", "--workflow-profile", "none", *arguments).stdout
        jobs, rule = set(), None
        for line in output.splitlines():
            if match := RULE.match(line):
                rule = match[1]
                jobs.add(rule)
            elif rule and (match := WILDCARDS.match(line)):
                jobs.discard(rule)
                jobs.add(f"{rule} {match[1]}")
                rule = None
        return jobs - {"all"}

    def hashes(self) -> dict[str, str]:
        """sha256 of every result, logs and times aside."""
        found = {}
        for path in sorted(self.results.rglob("*")):
            name = str(path.relative_to(self.results))
            timed = (
                "/logs/" in name
                or "/benchmarks/" in name
                or path.name in ("metrics.json", ".run.lock", ".home.json", ".makers.json", "jobs.json")
            )
            if path.is_file() and not timed and path.name != ".snakemake_timestamp":
                found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        return found


def make_environment(folder: Path) -> Path:
    """A virtual environment that shares this one's packages; its `llmppo` runs fake stages."""
    venv.create(folder, symlinks=True, with_pip=False)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    shared = sysconfig.get_path("purelib")
    pth = folder / "lib" / version / "site-packages" / "shared.pth"
    pth.write_text(f"import site; site.addsitedir({shared!r})\n")
    command = folder / "bin" / "llmppo"
    fake = REPOSITORY / "tests" / "workflow" / "fake_stages.py"
    command.write_text(f'#!/bin/sh\nexec "{folder}/bin/python" "{fake}" "$@"\n')
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    return folder / "bin" / "python"


def llmppo_run(folder: Path, cores: int, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            str(Path(sys.executable).with_name("llmppo")), "run", "--config", "smoke.yaml",
            "--cores", str(cores), *options,
        ],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Variables by which Snakemake finds an S3 server on this machine, whose store is empty. Skips a test without its packages."""
    if find_spec("snakemake_storage_plugin_s3") is None or find_spec("moto") is None:
        pytest.skip("packages of requirements-s3.lock are not installed: make s3")
    port = free_port()
    # A process of its own: vLLM, which other tests load, stumbles over what its web framework leaves in a process.
    server = subprocess.Popen(
        [sys.executable, "-c", "from moto.server import main; main()", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(url)
        yield {
            f"SNAKEMAKE_STORAGE_S3_{name}": value for name, value in {"ENDPOINT_URL": url, **S3_KEYS}.items()
        }
    finally:
        server.kill()
        server.wait()
