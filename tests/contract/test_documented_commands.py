"""Every command that README, docs and config/README.md show is one that the programs take.

Options and their values are parsed by the program's own parser where it can be had; named files, targets and config keys
must exist, in this repository as it is. A command that nothing here knows how to check fails, so that none goes unchecked.
`workflow/test_documented_runs.py` runs them.
"""

import re
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import pytest
from shown import COMMANDS, FENCE, INLINE, PAGES, PLACEHOLDER, REPOSITORY, SHELLS, Shown, files

from llmppo.cli import main
from llmppo.config import ExperimentConfig
from llmppo.experiment import load_experiment
from llmppo.run import configure, find_profile

LANGUAGES = (*SHELLS, "python", "yaml", "sql", "text", "latex")
OwnFiles = dict[str, Path | None]


def test_enough_is_found() -> None:
    assert len(COMMANDS) > 50
    assert sum(command.whole for command in COMMANDS) > 20


def test_every_block_says_its_language_and_no_command_stands_outside_of_one() -> None:
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        for _, language, block in FENCE.findall(text):
            assert language in LANGUAGES, (
                f"{path.name}: {language!r} of a block that begins with {block[:40]!r}"
            )
        for line in FENCE.sub("", text).splitlines():
            assert not re.match(rf" {{4,}}({'|'.join(INLINE)}) ", line), f"{path.name}: {line}"


@pytest.fixture
def own_files(tmp_path: Path) -> OwnFiles:
    """The YAML files that pages show in full, such as `# study.yaml`; None for one with a path of the reader's to fill in."""
    found: OwnFiles = {}
    for name, content in files().items():
        if name.endswith(".yaml"):
            (tmp_path / name).write_text(content)
            found[name] = None if "path/to/" in content else tmp_path / name
    return found


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_shown_command_is_known(
    command: Shown, own_files: OwnFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    program, *words = command.words
    check = CHECKS.get(program)
    assert check is not None, f"no check for {program}: add one to CHECKS"
    check(words, command.whole, own_files)


def file_exists(name: Any, own_files: OwnFiles) -> Path | None:
    """The file, None where the name is a reader's own."""
    if str(name) in own_files:
        return own_files[str(name)]
    if PLACEHOLDER.search(str(name)):
        return None
    assert Path(name).exists(), f"there is no {name}"
    return Path(name)


def check_llmppo(words: list[str], whole: bool, own_files: OwnFiles) -> None:
    name, *arguments = words
    assert name in main.commands, f"llmppo has no command {name}"
    if not whole and arguments[:1] in (["…"], ["..."]):
        return
    try:
        context = main.commands[name].make_context(name, arguments)
    except click.exceptions.Exit:  # --help
        return
    except (click.MissingParameter, click.BadOptionUsage) as error:
        if whole or isinstance(error, click.NoSuchOption):
            raise
        return
    given = context.params
    if rest := list(given.get("snakemake_args", ())):
        check_snakemake(rest, whole, own_files)
    if "profile" in given:
        find_profile(Path("Snakefile"), given["profile"])
    config = file_exists(given.get("config") or given.get("file") or "config/config.yaml", own_files)
    if config is not None:
        load_experiment(config)
        configure(config, None, given.get("changes", ()))


@cache
def snakemake_parser() -> Any:
    from snakemake.cli import get_argument_parser

    return get_argument_parser()


def check_snakemake(words: list[str], whole: bool, own_files: OwnFiles) -> None:
    try:
        given = snakemake_parser().parse_args(words)
    except SystemExit:
        pytest.fail(f"snakemake doesn't take {' '.join(words)}")
    for name in given.configfile or ():
        file_exists(name, own_files)
    for setting in given.config or ():
        assert setting.partition("=")[0] in ExperimentConfig.model_fields, setting
    if given.workflow_profile:
        find_profile(Path("Snakefile"), given.workflow_profile)
    rules = "".join(path.read_text(encoding="utf-8") for path in Path("workflow", "rules").glob("*.smk"))
    for target in given.targets:
        assert re.search(rf"^ *rule {target}:", rules, re.MULTILINE), f"there is no rule {target}"


def check_make(words: list[str], whole: bool, own_files: OwnFiles) -> None:
    done = subprocess.run(["make", "--dry-run", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def check_python(words: list[str], whole: bool, own_files: OwnFiles) -> None:
    if words[0] == "-c":
        compile(words[1], "shown", "exec")
        return
    script, *arguments = words
    source = Path(script).read_text(encoding="utf-8")
    flags = [word.partition("=")[0] for word in arguments if word.startswith("-")]
    if "argparse" not in source:
        assert not arguments, f"{script} takes no arguments"
        return
    step = [arguments[0]] if arguments and f'add_parser("{arguments[0]}"' in source else []
    done = subprocess.run([sys.executable, script, *step, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for flag in flags:
        assert re.search(rf"(?<![\w-]){flag}(?![\w-])", done.stdout), f"{script} has no {flag}"


def check_vllm(words: list[str], whole: bool, own_files: OwnFiles) -> None:
    """Its options are those that a run gives to its own server, which is tested, and where it listens."""
    engines = REPOSITORY / "src" / "llmppo" / "engines"
    source = (engines / "vllm.py").read_text() + (engines / "vllm_server.py").read_text()
    assert words[0] == "serve"
    for flag in (word for word in words if word.startswith("--")):
        given = f'"{flag[2:].replace("-", "_")}":' in source or f'"{flag}"' in source
        assert given or flag in ("--host", "--port"), f"vllm serve {flag}: no run gives that"


def check_named_file(words: list[str], whole: bool, own_files: OwnFiles) -> None:
    """Other people's programs: the file of `-f` or `-r` exists."""
    named = [value for flag, value in pairwise(words) if flag in ("-f", "-r")]
    assert named or not whole
    for name in named:
        file_exists(name, own_files)


def check_paths(words: list[str], whole: bool, own_files: OwnFiles) -> None:
    for word in words:
        file_exists(word, own_files)


def check_export(words: list[str], whole: bool, own_files: OwnFiles) -> None:
    for word in words:
        assert re.fullmatch(r"[A-Z0-9_]+=.*", word), word


def check_activate(words: list[str], whole: bool, own_files: OwnFiles) -> None:
    assert words == [".venv/bin/activate"]


CHECKS = {
    "llmppo": check_llmppo,
    "snakemake": check_snakemake,
    "make": check_make,
    "python": check_python,
    "vllm": check_vllm,
    "docker": check_named_file,
    "kubectl": check_named_file,
    "conda": check_named_file,
    "pip": check_named_file,
    "pytest": check_paths,
    "export": check_export,
    ".": check_activate,
}
