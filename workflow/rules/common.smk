# The validated plan of the experiment, and what every rule takes from it.
#
# Rules never read `config`: inputs, params and resources come from `PLAN`, so that a job's params are
# exactly the settings its stage reads. Shell strings use nothing but params, so the rules work in a module.

import gc
import inspect
import os
import re
import shlex
import sys
from pathlib import Path

from llmppo.experiment import parse_experiment, read_values
from llmppo.errors import LlmppoError
from llmppo.makers import note_start
from llmppo.ownership import check_home, hold_for_good, in_use
from llmppo.plan import Plan
from llmppo.process import (
    PARENT,
    SERVER_LOG,
    prefer_own_commands,
    thread_environment,
)
from llmppo.worker.client import OFF, WORKER

# Results in an object store: a job has copies of what its rule declares and nothing else.
STORED = workflow.storage_settings.default_storage_provider is not None

try:
    for configfile in workflow.configfiles:
        read_values(configfile)  # Snakemake has read it, but takes a repeated key
    PLAN = Plan(
        parse_experiment(config, ", ".join(map(str, workflow.configfiles)) or "config"),
        whole_folders=STORED,
    )
    check_home(PLAN.layout.results)
    # Snakemake would call what another run is just writing incomplete; `onstart` is the one that refuses.
    if workflow.is_main_process and (
        taken := in_use(PLAN.layout.results, PLAN.layout.lock)
    ):
        print(f"Note: {taken}", file=sys.stderr)
except LlmppoError as error:
    # An exception would be shown with a trace, which says nothing to who mistyped a key.
    sys.exit(f"Error in {error}")

LAYOUT = PLAN.layout
CHAIN = LAYOUT.of_chain("{variant}", "{seed}")

# Snakemake limits jobs to a hundred a second, and for every job it has started its scheduler then wakes once
# a second for good: a whole core by the thousandth job. A limit that somebody asked for stays.
LIMITS = workflow.scheduling_settings
if LIMITS is not None and LIMITS.max_jobs_per_timespan is not None:
    if (
        LIMITS.max_jobs_per_timespan.max_jobs,
        LIMITS.max_jobs_per_timespan.timespan,
    ) == (100, 1):
        LIMITS.max_jobs_per_timespan = None

# Planning makes millions of objects that stay: looking through them for garbage took a sixth of its time.
gc.set_threshold(100_000, 50, 100)

LOCK = None


onstart:
    try:
        LOCK = hold_for_good(LAYOUT.lock, LAYOUT.results)
        PLAN.record_jobs()
        note_start(PLAN)
    except (LlmppoError, OSError) as error:
        sys.exit(f"Error: {error}")


# The rules call `llmppo` from the environment that runs Snakemake, whether or not it is activated.
prefer_own_commands()

# Stages on this machine share a worker; a job of a cluster is a Snakemake of its own and runs cold.
os.environ[WORKER] = (
    OFF if workflow.remote_exec else os.environ.get(WORKER, LAYOUT.worker_log)
)
os.environ[SERVER_LOG] = LAYOUT.server_log


def any_of(variants):
    """Constraint of the wildcard `variant` in a rule that serves only these."""
    return "|".join(map(re.escape, variants)) or "(?!)"


wildcard_constraints:
    variant=any_of(PLAN.variants),
    seed=r"\d+",
    iteration=r"\d\d\d\d+",
    step=r"\d+",
    shard=r"\d+",
    key=r"[0-9a-f]{12}",


def of_job(function):
    """A function of a job that carries its signature: Snakemake looks at it some thirty times a job."""
    function.__signature__ = inspect.signature(function)
    return function


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
    return of_job(lambda wildcards: PLAN.settings_json(stage, wildcards.variant))


def code(stage):
    """Token of the code behind the stage: a changed stage reruns."""
    return of_job(lambda wildcards: PLAN.code(stage, wildcards.variant))


def first(wildcards):
    """Priority of what comes before a chain's first iteration."""
    return PLAN.last + 1


@of_job
def keep_pace(wildcards):
    """Priority of an iteration's jobs: chains that lag behind go first, so that none is left alone at the end."""
    return max(PLAN.last - int(wildcards.iteration), 0)


def whole(folder):
    """A folder as an output: by its manifest, or with all that is in it."""
    return directory(folder) if STORED else PLAN.watched(folder)


def from_outside(files):
    """Inputs that no rule makes, which lie where the config says and not among the results."""
    return [local(file) for file in files]


def input_folder(name):
    """Folder of the manifest that is input `name`."""
    return of_job(lambda wildcards, input: str(Path(input[name]).parent))


def output_folder(name):
    """Folder of the file that is output `name`."""
    return of_job(lambda wildcards, output: str(Path(output[name]).parent))


def input_option(name):
    """`--name FILE` when the list of files that is input `name` has one, else nothing."""

    @of_job
    def arguments(wildcards, input):
        return " ".join(f"--{name} {shlex.quote(str(file))}" for file in input[name])

    return arguments


# Who stands for a shared artefact: the first of its users. They agree on everything that counts.


def base_model_chain(wildcards):
    return PLAN.base_models[wildcards.key]


def warmup_chain(wildcards):
    return PLAN.warmups[wildcards.key]


def dataset_variant(wildcards):
    return PLAN.datasets[wildcards.key]


# Artefacts of a job's chain.


@of_job
def base_manifest(wildcards):
    return PLAN.base_manifest(*chain_of(wildcards))


@of_job
def dataset_manifest(wildcards):
    return PLAN.dataset_manifest(wildcards.variant)


@of_job
def previous_policy(wildcards):
    """The policy that iteration i samples with and starts from: the one that iteration i-1 wrote."""
    return PLAN.policy_manifest(*chain_of(wildcards), int(wildcards.iteration) - 1)


@of_job
def own_policy(wildcards):
    """The policy of the job's iteration."""
    return PLAN.policy_manifest(*chain_of(wildcards), int(wildcards.iteration))


@of_job
def own_rollouts(wildcards):
    """The rollouts of the job's iteration."""
    return PLAN.rollouts(*chain_of(wildcards), int(wildcards.iteration))


@of_job
def stop_evaluation(wildcards):
    """The evaluation that may end the chain before the job's iteration, if there is one."""
    return PLAN.stop_evaluation(*chain_of(wildcards), int(wildcards.iteration))


@of_job
def prune_option(wildcards):
    """What goes of an older policy once the job's iteration is done."""
    return PLAN.prune_option(int(wildcards.iteration))


def start_of(block):
    """The policy that a block of iterations starts from."""
    return lambda wildcards: PLAN.policy_manifest(*chain_of(wildcards), block.first - 1)


def stop_evaluation_of(block):
    """The evaluation that may end a chain before a block of iterations, if there is one."""
    return lambda wildcards: PLAN.stop_evaluation(*chain_of(wildcards), block.first)


def last_policy(wildcards):
    return PLAN.policy_manifest(*chain_of(wildcards), PLAN.last)
