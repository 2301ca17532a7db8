"""How a stage runs as a command: its settings, its process, its log and its errors.

`stage_command` makes the click command of a stage: it reads `--settings`, prepares the process, imports
`llmppo.stages.<name>` and calls its `run(settings, **options)`.
"""

import faulthandler
import json
import os
import resource
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

import click

from llmppo.errors import ConfigError, LlmppoError, machine_fault, memory_fault
from llmppo.files import MANIFEST, write_json
from llmppo.process import die_with_workflow, is_rank, redirect_output, run_ranks, thread_environment
from llmppo.secrecy import redact
from llmppo.worker.client import delegate, offered

FILE = click.Path(path_type=Path, dir_okay=False)


class Folder(click.Path):
    """A folder; a rule names it by the manifest in it, which is the file that Snakemake watches."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(value)
        return super().convert(path.parent if path.name == MANIFEST else path, param, ctx)


FOLDER = Folder(path_type=Path, file_okay=False)


def option(name: str, kind: Any, text: str, required: bool = True) -> click.Option:
    """An option whose help says what it holds; required unless said otherwise."""
    return click.Option([f"--{name}"], type=kind, help=text, required=required)


SETTINGS = option(
    "settings",
    click.STRING,
    "JSON text of the config sections that the stage reads, or the path of an experiment YAML.",
)
NO_SETTINGS = click.Option(["--settings"], default="{}", hidden=True)
VARIANT = option(
    "variant", click.STRING, "Variant to take from a YAML; the first without it.", required=False
)
CODE_TEXT = "Token of the code that the run was planned with; code of yours that differs is refused."
CODE = click.Option(["--code", "planned"], help=CODE_TEXT)
LOG = option(
    "log", FILE, "File that gets the output; one line still appears on the terminal.", required=False
)


def read_settings(text: str, stage: str, variant: str | None) -> dict[str, Any]:
    """Settings from JSON text, or the sections that `stage` reads from an experiment YAML.

    Raises ConfigError.
    """
    if text.lstrip().startswith("{"):
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"--settings: not valid JSON: {error}") from None
    from llmppo.experiment import load_experiment, variant_config
    from llmppo.stage_settings import stage_settings

    experiment = load_experiment(text)
    if stage != "report":
        experiment = variant_config(experiment, variant or next(iter(experiment.variants)), text)
    return stage_settings(experiment, stage)


def _say(text: str, terminal: TextIO | None) -> None:
    """To stderr, and to the terminal where stderr is a log, which may be on a full disk."""
    text = redact(text)
    for stream in (sys.stderr, terminal):
        if stream is not None:
            with suppress(OSError):
                print(text, file=stream, flush=True)


def run_stage(
    stage: str,
    settings: str,
    variant: str | None,
    log: Path | None,
    options: dict[str, Any],
    code: str | None = None,
) -> int:
    """Run one stage, in this process or in a child of the workflow's worker; returns its exit status.

    With the token `code`, code of the user's that isn't what the run was planned with is an error.
    """
    workflow = die_with_workflow()
    if workflow is not None and offered(stage, settings):
        status = delegate(workflow, options.get("base"), sys.argv[1:])
        if status is not None:
            return status
    if is_rank():
        log = None  # the process that started it has sent its output there
    terminal: TextIO | None = None
    name = f"llmppo {stage.replace('_', '-')}"
    try:
        terminal = redirect_output(log) if log else None
        # Native code that crashes, as an environment's may, tells the Python lines that led there.
        faulthandler.enable(2)
        values = read_settings(settings, stage, variant)
        if values.get("ranks", 1) > 1 and not is_rank():
            failed = run_ranks(values["ranks"], sys.argv[1:])
            if failed:
                where = f"; what it said is in {log}" if log else ""
                _say(f"{name}: a process of {values['ranks']} ended with an error{where}", terminal)
            return failed
        os.environ.update(thread_environment(int(values.get("threads", 1))))
        with _planned_code(code, values):
            summary = import_module(f"llmppo.stages.{stage}").run(values, **options)
    except LlmppoError as error:
        _say(f"{name}: error: {error}", terminal)
        return 1
    except KeyboardInterrupt:
        _say(f"{name}: interrupted", terminal)
        return 130
    except Exception as error:
        place = options.get("out") or options.get("chain")
        if fault := machine_fault(error, place) or memory_fault(error, stage):
            _say(f"{name}: error: {fault}", terminal)
            return 1
        if terminal is None:
            raise
        print(redact(traceback.format_exc()), file=sys.stderr)
        last = redact(traceback.format_exception_only(error)[-1].strip())
        print(f"{name}: {last} (traceback in {log})", file=terminal, flush=True)
        return 1
    if summary:
        _say(summary, terminal)
    if log is not None:
        with suppress(OSError):  # on a full disk the report does without
            _write_usage(log.with_suffix(".json"))
    return 0


@contextmanager
def _planned_code(code: str | None, settings: Any) -> Iterator[None]:
    """Within, an import of the user's code that is not what the run was planned with raises ConfigError."""
    if code is None:
        yield
        return
    from llmppo.codetoken import require_planned
    from llmppo.imports import checked_imports

    with checked_imports(partial(require_planned, code, settings)):
        yield


def _write_usage(path: Path) -> None:
    """CPU seconds and peak memory of this process, beside its log, for the report."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    write_json(path, {"cpu_s": usage.ru_utime + usage.ru_stime, "peak_memory_mb": usage.ru_maxrss / 1024})


def stage_command(
    stage: str, text: str, *parameters: click.Parameter, settings: click.Option = SETTINGS
) -> click.Command:
    """The command of a stage with its own parameters; `text` is its help."""
    has_variant = any(parameter.name == "variant" for parameter in parameters)

    def callback(settings: str, log: Path | None, variant: str | None, **given: Any) -> None:
        planned = given.pop("planned", None)
        options = {**given, "variant": variant} if has_variant else given
        sys.exit(run_stage(stage, settings, variant, log, options, planned or given.get("code")))

    return click.Command(
        stage.replace("_", "-"),
        callback=callback,
        params=[settings, *([] if has_variant else [VARIANT]), *parameters, LOG],
        help=text,
    )
