"""The `llmppo` command: the workflow's stages, and the commands around a run.

Argument parsing only. Every command imports what it needs when it is called, so that `--help` is instant.
"""

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from llmppo import __version__
from llmppo.errors import LlmppoError, machine_fault
from llmppo.secrecy import redact
from llmppo.stage_command import CODE, FILE, FOLDER, NO_SETTINGS, option, stage_command
from llmppo.worker.client import OFF, WORKER


class Commands(click.Group):
    """Prints errors that a user can mend as one message; lists commands in the order of the workflow."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except LlmppoError as error:
            click.echo(redact(f"llmppo {ctx.invoked_subcommand}: error: {error}"), err=True)
            ctx.exit(1)
        except OSError as error:
            if (fault := machine_fault(error)) is None:
                raise
            click.echo(f"llmppo {ctx.invoked_subcommand}: error: {fault}", err=True)
            ctx.exit(1)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


CONFIG = click.option(
    "--config", type=FILE, default="config/config.yaml", show_default=True, help="Experiment YAML."
)
RESULTS = click.option("--results", type=FOLDER, help="Output root instead of the config's `results`.")
CORES = click.option("--cores", default="all", show_default=True, help="Jobs of one thread that run at once.")


def _given(config: Path, results: Path | None, changes: tuple[str, ...]) -> list[str]:
    """The options of a command that choose the experiment, to be given to another one."""
    words = ["--config", str(config)]
    words += [] if results is None else ["--results", str(results)]
    return words + [word for change in changes for word in ("--set", change)]


CHANGES = click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a config key, such as `--set ppo.clip_coef=0.1`; the value is YAML. Repeatable.",
)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__)
def main() -> None:
    """Turn-level PPO for language models as a reproducible Snakemake workflow.

    `llmppo run` trains what a config describes, and goes on where it stopped. The stages are commands of
    their own, which read files and write files; Snakemake calls them.
    """


@main.command(context_settings={"ignore_unknown_options": True})
@CONFIG
@RESULTS
@click.option(
    "--cores", help="Jobs of one thread that run at once; without it all that this machine has cores for."
)
@CHANGES
@click.option(
    "--profile",
    default="default",
    show_default=True,
    help="Where and how jobs run: a folder of `workflow/profiles`, such as `slurm`, or of your own.",
)
@click.option(
    "--worker/--no-worker",
    default=True,
    help="Fork stages from one process that has libraries and base models loaded, or start each cold. Same results.",
)
@click.argument("snakemake_args", nargs=-1, type=click.UNPROCESSED)
def run(
    config: Path,
    results: Path | None,
    cores: str | None,
    changes: tuple[str, ...],
    profile: str,
    worker: bool,
    snakemake_args: tuple[str, ...],
) -> None:
    """Run an experiment, or go on with it.

    The same command continues after any interruption and does nothing once all is done. What it doesn't
    know goes to snakemake, for instance `-n` for a dry run. A second run on the same results is refused
    (exit status 73).
    """
    from llmppo.run import configure, run_experiment

    if not worker:
        os.environ[WORKER] = OFF
    values, plan = configure(config, results, changes)
    sys.exit(run_experiment(values, plan, cores, profile, snakemake_args))


@main.command()
@CONFIG
@RESULTS
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=5000, show_default=True, help="Port to listen on.")
def ui(config: Path, results: Path | None, host: str, port: int) -> None:
    """Open the MLflow UI on the results."""
    from llmppo.run import serve_tracker

    serve_tracker(config, results, host, port)


@main.command()
@CONFIG
@RESULTS
@CHANGES
def status(config: Path, results: Path | None, changes: tuple[str, ...]) -> None:
    """Tell what is done, at work, left and broken, and why a job would run again."""
    from rich.console import Console

    from llmppo.run import configure, find_snakefile
    from llmppo.status import experiment_status, show_status

    values, plan = configure(config, results, changes)
    show_status(Console(highlight=False), plan, experiment_status(values, plan, find_snakefile()))


@main.command()
@CONFIG
@RESULTS
@CHANGES
@click.option("--repeat", type=FILE, help="Also run the stage that made this file again, and compare.")
def verify(config: Path, results: Path | None, changes: tuple[str, ...], repeat: Path | None) -> None:
    """Compare every file of the results with its manifest; exit status 1 where one is damaged.

    A damaged file is named, with the command that makes it again. `--repeat FILE` runs one stage again, in a copy
    beside the results, and compares what it writes.
    """
    from llmppo.rebuild import way_back
    from llmppo.run import configure, find_snakefile
    from llmppo.verify import check
    from llmppo.verify import repeat as run_again

    values, plan = configure(config, results, changes)
    checked = list(check(Path(plan.layout.results)))
    faults = [entry for entry in checked if entry.fault is not None]
    again_with = shlex.join(["llmppo", "run", *_given(config, results, changes)])
    for entry in faults:
        delete, target = way_back(plan, entry.path)
        click.echo(
            f"{entry.fault}\n  once more: rm -r {shlex.join(delete)} && {again_with} {shlex.quote(target)}"
        )
    click.echo(f"{len(checked)} artefacts checked in {plan.layout.results}, {len(faults)} damaged")
    different: list[str] = []
    if repeat is not None:
        again = run_again(values, plan.layout.results, repeat, find_snakefile())
        different = again.different
        for file in again.written:
            click.echo(f"{'differs' if file in different else 'the same'}  {file}")
    sys.exit(1 if faults or different else 0)


@main.command()
@CONFIG
@RESULTS
@CHANGES
def adopt(config: Path, results: Path | None, changes: tuple[str, ...]) -> None:
    """Go on from here with results that were moved or copied; nothing runs.

    All that exists counts as made with this config, which must be the one that made it. Change it afterwards, and
    what depends on it runs again.
    """
    from llmppo.adopt import adopt as take_over
    from llmppo.run import configure, find_snakefile

    values, plan = configure(config, results, changes)
    chains = take_over(values, plan, find_snakefile())
    click.echo(f"{plan.layout.root}: {chains} of {len(plan.chains)} chains taken over; `llmppo run` goes on")


@main.command()
@click.argument("results", type=FOLDER)
@click.option("--variant", help="Variant; the first one by name without it.")
@click.option("--seed", type=click.IntRange(min=0), help="Seed; the first one without it.")
@click.option("--iteration", type=click.IntRange(min=0), help="Iteration; the latest one without it.")
@click.option("--evaluation", is_flag=True, help="Evaluation episodes instead of training rollouts.")
@click.option("--decoding", type=click.Choice(["sampled", "greedy"]), help="Which evaluation episodes.")
@click.option(
    "--only",
    type=click.Choice(["first", "worst", "best", "truncated", "invalid", "failed", "changed"]),
    default="first",
    show_default=True,
    help="Which episodes; `changed` are evaluation tasks that ended otherwise after `--since`.",
)
@click.option(
    "--since", type=click.IntRange(min=0), default=0, show_default=True, help="Policy to compare with."
)
@click.option(
    "--count", "-n", type=click.IntRange(min=1), default=3, show_default=True, help="Episodes to print."
)
def show(
    results: Path,
    variant: str | None,
    seed: int | None,
    iteration: int | None,
    evaluation: bool,
    decoding: str | None,
    only: Any,
    since: int,
    count: int,
) -> None:
    """Print transcripts of RESULTS, the folder of an experiment: replies, rewards, values, advantages."""
    from rich.console import Console

    from llmppo.reporting import show as shown

    if since and only != "changed":
        raise click.UsageError("--since goes with --only changed")
    chain = shown.chain_folder(results, variant, seed)
    if only == "changed":
        pairs = shown.changed(
            shown.evaluation(chain, since, decoding), shown.evaluation(chain, iteration, decoding), count
        )
        chosen = [entry for pair in pairs for entry in pair]
    else:
        entries = (
            shown.evaluation(chain, iteration, decoding) if evaluation else shown.rollouts(chain, iteration)
        )
        chosen = shown.choose(entries, only, count)
    console = Console(highlight=False)
    shown.show(console, chosen)
    if not chosen:
        console.print(f"no such episodes in {chain}")


@main.command()
@click.argument("results", type=FOLDER)
@CHANGES
@click.option("--variant", help="Variant that sampled the rollouts; the first one without it.")
@click.option("--name", help="Name of the replay; made of the changes without it.")
@CORES
def replay(
    results: Path, changes: tuple[str, ...], variant: str | None, name: str | None, cores: str
) -> None:
    """Repeat the updates of a finished run on its stored rollouts, with other settings, beside the original.

    RESULTS is the folder of an experiment. Nothing is sampled for training: what other hyper-parameters make
    of the same episodes, and how far off-policy that is, is told at the end, and stands in the report.

        llmppo replay results/guess-number --set ppo.clip_coef=0.1
    """
    from llmppo.replay import outcome, replayed
    from llmppo.run import run_experiment

    values, plan, name = replayed(results, changes, variant, name)
    status = run_experiment(values, plan, cores)
    if status == 0:
        click.echo(outcome(plan, name))
    sys.exit(status)


@main.command()
@click.argument("file", type=FILE, default="config/config.yaml")
def validate(file: Path) -> None:
    """Check an experiment YAML and say what it would run."""
    from llmppo.experiment import import_callables, load_experiment, twins
    from llmppo.plan import Plan

    experiment = load_experiment(file)
    import_callables(experiment)
    plan = Plan(experiment)
    for warning in twins(plan.variants):
        click.echo(warning, err=True)
    click.echo(f"{file} is valid. {plan.summary()}")


@main.command()
@click.option("--out", type=FILE, help="File to write instead of printing.")
@click.option("--markdown", is_flag=True, help="The reference of all keys as Markdown instead.")
@click.option(
    "--parameters", is_flag=True, help="The reference of `LLMPPO`'s parameters as Markdown instead."
)
def schema(out: Path | None, markdown: bool, parameters: bool) -> None:
    """JSON schema of experiment files, for editors and other programs."""
    from llmppo.schema import json_schema, key_reference

    if parameters:
        from llmppo.reference import parameter_reference

        text = parameter_reference()
    else:
        text = key_reference() if markdown else json_schema()
    if out is None:
        click.echo(text, nl=False)
    else:
        out.write_text(text, encoding="utf-8")


SEED = option("seed", click.IntRange(min=0), "Random seed of the chain.")
BASE = option("base", FOLDER, "Base model folder.")
POLICY = option("policy", FOLDER, "Policy folder `policy/<iteration>`.")
DATASET = option("dataset", FOLDER, "Dataset folder, for environments that read rows.", required=False)
ITERATION = option("iteration", click.IntRange(min=0), "Iteration number.")
EVALUATION = option(
    "evaluation", FILE, "Evaluation metrics of that policy, when `stop_at` needs them.", required=False
)
PRUNABLE = click.Choice(["optimizer", "weights"])
RUN_DIR = option("run-dir", FOLDER, "Folder of the chain: `<experiment>/<variant>/seed-<seed>`.")


def rollout_files(required: bool) -> click.Argument:
    return click.Argument(["rollouts"], nargs=-1, required=required, type=FILE)


for command in (
    stage_command(
        "base_model",
        "Build, convert or copy the base model, which stays frozen from then on.",
        SEED,
        option("out", FOLDER, "Model folder to write, in Hugging Face format with its tokenizer."),
        CODE,
    ),
    stage_command(
        "dataset",
        "Write training rows and held-out rows, from a generator or from your own JSONL files.",
        option("out", FOLDER, "Folder to write: train.jsonl, eval.jsonl, manifest.json."),
        CODE,
    ),
    stage_command(
        "baselines",
        "Measure the floors and bounds of the environment, such as random play.",
        DATASET,
        option("out", FILE, "JSON file to write."),
        CODE,
    ),
    stage_command(
        "rollout",
        "Sample one shard of an iteration's episodes.",
        BASE,
        option("policy", FOLDER, "Policy folder that samples; the base model without it.", required=False),
        DATASET,
        SEED,
        option("split", click.Choice(["train", "warmup"]), "What the episodes are for."),
        ITERATION,
        option("shard", click.IntRange(min=0), "Which part of the iteration's episodes, from 0."),
        option("out", FILE, "Parquet file of episodes to write."),
        CODE,
    ),
    stage_command(
        "critic_warmup",
        "Write policy 0: fresh adapters, and a critic fitted to ROLLOUTS of the policy that stands still.",
        BASE,
        SEED,
        option("out", FOLDER, "Policy folder to write: `policy/0000`."),
        option("metrics", FILE, "JSON file of metrics to write."),
        rollout_files(required=False),
    ),
    stage_command(
        "update",
        "Update actor and critic on ROLLOUTS: one learn call of turn-level PPO.",
        BASE,
        option("policy", FOLDER, "Policy folder of the iteration before."),
        SEED,
        ITERATION,
        EVALUATION,
        option(
            "prune",
            PRUNABLE,
            "What to delete of the policy before that one, once all is written; nothing without it.",
            required=False,
        ),
        option("out", FOLDER, "Policy folder to write."),
        option("advantages", FILE, "Parquet file of values, advantages and returns to write."),
        option("metrics", FILE, "JSON file of metrics to write."),
        rollout_files(required=True),
    ),
    stage_command(
        "iterations",
        "Run several iterations of a chain in one process: rollouts, shard after shard, and update.",
        BASE,
        DATASET,
        SEED,
        option("first", click.IntRange(min=1), "First iteration."),
        option("last", click.IntRange(min=1), "Last iteration."),
        option("chain", FOLDER, "Folder of the chain, which has the policy before the first iteration."),
        EVALUATION,
        click.Option(
            ["--prune"],
            type=(int, PRUNABLE),
            multiple=True,
            help="A policy, and what to delete of it once no iteration needs it. Repeatable.",
        ),
        option(
            "code",
            click.STRING,
            "Token of the code that the run was planned with: code of yours that differs is refused, and what another one left unfinished is dropped.",
        ),
    ),
    stage_command(
        "evaluate",
        "Play the fixed held-out tasks with a policy.",
        BASE,
        POLICY,
        DATASET,
        ITERATION,
        option("out", FOLDER, "Folder to write: episodes by decoding, and metrics.json."),
        CODE,
    ),
    stage_command(
        "export",
        "Export a policy as PEFT adapter and merged model, with a model card.",
        BASE,
        POLICY,
        RUN_DIR,
        option("out", FOLDER, "Folder to write: adapter, merged model, model card."),
    ),
    stage_command(
        "variant_config",
        "Write the resolved config of one chain: an experiment file that reproduces it alone.",
        option("out", FILE, "YAML file to write."),
    ),
    stage_command(
        "mlflow_init",
        "Create the tracker's tables once, before several jobs want to.",
        option("uri", click.STRING, "Tracking URI."),
        option("out", FILE, "Marker file to write."),
        settings=NO_SETTINGS,
    ),
    stage_command(
        "track",
        "Mirror a chain's metrics, transcripts and export to MLflow; logging again adds nothing.",
        option("experiment", click.STRING, "MLflow experiment."),
        option("variant", click.STRING, "Variant of the chain."),
        SEED,
        RUN_DIR,
        option("uri", click.STRING, "Tracking URI."),
        option("out", FILE, "Marker file to write."),
    ),
    stage_command(
        "report",
        "Write the report of an experiment: one HTML file, figures, and a table.",
        option("results", FOLDER, "Folder of the experiment: `<results>/<experiment>`."),
        option("baselines", FILE, "Floors and bounds of the environment.", required=False),
        option("out", FILE, "HTML file to write; figures and tables lie beside it."),
        click.Option(["--tracked"], is_flag=True, help="Link to the runs that `track` will log."),
    ),
):
    main.add_command(command)


if __name__ == "__main__":
    main()
