# The validated plan of the experiment, and what every rule takes from it.
#
# Rules never read `config`: inputs, params and resources come from `PLAN`, so that a job's params are
# exactly the settings its stage reads. Shell strings use nothing but params, so the rules work in a module.

import os
import re
import shlex
import sys
from pathlib import Path

from llmppo.experiment import parse_experiment, read_values
from llmppo.errors import LlmppoError
from llmppo.ownership import check_home, hold_for_good
from llmppo.plan import Plan
from llmppo.process import (
    PARENT,
    SERVER_LOG,
    prefer_own_commands,
    thread_environment,
)
from llmppo.worker.client import OFF, WORKER

try:
    for configfile in workflow.configfiles:
        read_values(configfile)  # Snakemake has read it, but takes a repeated key
    PLAN = Plan(
        parse_experiment(config, ", ".join(map(str, workflow.configfiles)) or "config")
    )
    check_home(PLAN.layout.results)
except LlmppoError as error:
    # An exception would be shown with a trace, which says nothing to who mistyped a key.
    sys.exit(f"Error in {error}")

LAYOUT = PLAN.layout

# Snakemake limits jobs to a hundred a second, and for every job it has started its scheduler then wakes once
# a second for good: a whole core by the thousandth job. A limit that somebody asked for stays.
LIMITS = workflow.scheduling_settings
if LIMITS is not None and LIMITS.max_jobs_per_timespan is not None:
    if (
        LIMITS.max_jobs_per_timespan.max_jobs,
        LIMITS.max_jobs_per_timespan.timespan,
    ) == (100, 1):
        LIMITS.max_jobs_per_timespan = None

LOCK = None


onstart:
    try:
        LOCK = hold_for_good(LAYOUT.lock, LAYOUT.results)
    except LlmppoError as error:
        sys.exit(f"Error: {error}")


# The rules call `llmppo` from the environment that runs Snakemake, whether or not it is activated.
prefer_own_commands()

# Stages on this machine share a worker; a job of a cluster is a Snakemake of its own and runs cold.
os.environ[WORKER] = (
    OFF if workflow.remote_exec else os.environ.get(WORKER, LAYOUT.worker_log)
)
os.environ[SERVER_LOG] = LAYOUT.server_log


wildcard_constraints:
    variant="|".join(map(re.escape, PLAN.variants)),
    seed=r"\d+",
    iteration=r"\d\d\d\d+",
    step=r"\d+",
    shard=r"\d+",
    key=r"[0-9a-f]{12}",


def chain_of(wildcards):
    """Variant and seed of a job."""
    return wildcards.variant, int(wildcards.seed)


def environment(stage):
    """Assignments in front of a command. The thread count is the config's, never Snakemake's scaled
    one: results must not depend on `--cores`. The stage dies with the process named by `PARENT`.
    """
    variables = {PARENT: "$PPID", **thread_environment(PLAN.resources(stage).threads)}
    return " ".join(f"{name}={value}" for name, value in variables.items())


def settings(stage):
    """Settings of the stage for the job's variant."""
    return lambda wildcards: PLAN.settings_json(stage, wildcards.variant)


def code(stage):
    """Token of the code behind the stage: a changed stage reruns."""
    return lambda wildcards: PLAN.code(stage, wildcards.variant)


def first(wildcards):
    """Priority of what comes before a chain's first iteration."""
    return PLAN.last + 1


def keep_pace(wildcards):
    """Priority of an iteration's jobs: chains that lag behind go first, so that none is left alone at the end."""
    return max(PLAN.last - int(wildcards.iteration), 0)


def input_folder(name):
    """Folder of the manifest that is input `name`."""
    return lambda wildcards, input: str(Path(input[name]).parent)


def output_folder(name):
    """Folder of the file that is output `name`."""
    return lambda wildcards, output: str(Path(output[name]).parent)


def input_option(name, folder=False):
    """`--name VALUE` when the list of files that is input `name` has one, else nothing."""

    def arguments(wildcards, input):
        paths = [Path(file) for file in input[name]]
        values = [path.parent if folder else path for path in paths]
        return " ".join(f"--{name} {shlex.quote(str(value))}" for value in values)

    return arguments


# Who stands for a shared artefact: the first of its users. They agree on everything that counts.


def base_model_chain(wildcards):
    return PLAN.base_models[wildcards.key]


def warmup_chain(wildcards):
    return PLAN.warmups[wildcards.key]


def dataset_variant(wildcards):
    return PLAN.datasets[wildcards.key]


# Artefacts of a job's chain.


def base_manifest(wildcards):
    return PLAN.base_manifest(*chain_of(wildcards))


def dataset_manifest(wildcards):
    return PLAN.dataset_manifest(wildcards.variant)


def previous_policy(wildcards):
    """The policy that iteration i samples with and starts from: the one that iteration i-1 wrote."""
    return PLAN.policy_manifest(*chain_of(wildcards), int(wildcards.iteration) - 1)


def last_policy(wildcards):
    return PLAN.policy_manifest(*chain_of(wildcards), PLAN.last)
