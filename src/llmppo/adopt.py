"""`llmppo adopt`: results that were moved or copied go on from this working directory.

Snakemake's notes on what made a file stay behind in the `.snakemake` of the old directory, and a copy may have lost
the order of its files' times. MLflow's store names the old folder for its artefacts. So all that exists is noted anew, by
Snakemake itself, as made with the config given. Each chain holds its config, and `makers` what else made it: where that
differs, nothing is noted.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from llmppo.errors import ConfigError, LlmppoError
from llmppo.files import read_sealed_text
from llmppo.makers import require_one_maker
from llmppo.ownership import HELD, hold, refusal, settle
from llmppo.plan import Plan
from llmppo.run import snakemake_command
from llmppo.tracking.relocate import bring_artefacts_along


def adopt(values: dict[str, Any], plan: Plan, snakefile: Path) -> int:
    """Take the results of `plan` over; returns how many chains there are. Nothing runs.

    `values` are the config's. Raises ConfigError naming keys that differ from those of a chain, LlmppoError where
    there are no results, other code or data made them, or a run is at work on them or was interrupted after an edit.
    """
    chains = [chain for chain in plan.chains if Path(plan.layout.config(*chain)).is_file()]
    if not chains:
        raise LlmppoError(f"{plan.layout.root} has no chain of this config; name another one with --results")
    for chain in chains:
        file = Path(plan.layout.config(*chain))
        made = yaml.safe_load(read_sealed_text(file))
        keys = list(differences(made, json.loads(plan.chain_file(*chain))["config"]))
        if keys:
            raise ConfigError(
                f"{file} was made with other values of {', '.join(keys)}; adopt with the config that made the results, "
                "then change it: what depends on it runs again"
            )
    require_one_maker(plan)
    with hold(Path(plan.layout.lock)) as lock:
        if lock is None:
            raise LlmppoError(refusal(plan.layout.results, plan.layout.lock))
        settle(plan.layout.results)
        if (database := Path(plan.layout.mlflow_database)).is_file():
            bring_artefacts_along(database)
        _note_all(values, plan, snakefile)
    return len(chains)


def differences(first: Any, second: Any, name: str = "") -> Iterator[str]:
    """Dotted keys whose values differ."""
    if isinstance(first, dict) and isinstance(second, dict):
        for key in sorted(first.keys() | second.keys(), key=str):
            yield from differences(first.get(key), second.get(key), f"{name}.{key}" if name else str(key))
    elif first != second:
        yield name


def _note_all(values: dict[str, Any], plan: Plan, snakefile: Path) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(values, file, sort_keys=False)
        file.flush()
        ran = subprocess.run(
            [
                *snakemake_command(snakefile), "--nolock", "--workflow-profile", "none", "--configfile", file.name,
                "--touch", "--forceall",
            ],
            env={**os.environ, HELD: plan.layout.lock},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
    if ran.returncode:
        raise LlmppoError(f"snakemake can't take the results over:\n{ran.stdout[-3000:]}")
