"""Every command that README, docs and config/README.md show is one that the programs take; none is run.

A shown command is a line of a fenced shell block, or code within a sentence that begins with a program of ours. Options and their
values are parsed by the program's own parser where it can be had; named files, targets and config keys must exist.
A command that nothing here knows how to check fails, so that none goes unchecked.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest

from llmppo.cli import main
from llmppo.config import ExperimentConfig
from llmppo.experiment import load_experiment
from llmppo.run import configure, find_profile

REPOSITORY = Path(__file__).parents[2]
PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "config" / "README.md",
    *sorted((REPOSITORY / "docs").glob("*.md")),
]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
SHELLS = ("sh", "bash", "shell", "console")
LANGUAGES = (*SHELLS, "python", "yaml", "sql", "text", "latex")
PLACEHOLDER = re.compile(r"\b[A-Z]{2,}\b|^my\b|^path/to/")  # NAME, my.yaml, path/to/model: a reader's own
OwnFiles = dict[str, Path | None]
INLINE = ("llmppo", "snakemake", "make", "python", "pytest", "pip", "conda")


class Shown(NamedTuple):
    page: str
    text: str
    whole: bool  # a line to be typed; within a sentence it may be only the command's name

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


def lines(block: str) -> Iterator[str]:
    """Commands of a shell block, without comments, continuation lines joined."""
    for line in block.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield shlex.join(words)


def shown() -> Iterator[Shown]:
    for path in PAGES:
        text, page = path.read_text(encoding="utf-8"), str(path.relative_to(REPOSITORY))
        for _, language, block in FENCE.findall(text):
            if language in SHELLS:
                yield from (Shown(page, line, True) for line in lines(block))
        for code in re.findall(r"`([^`]+)`", FENCE.sub("", text)):
            words = code.split()
            if len(words) > 1 and words[0] in INLINE:
                yield Shown(page, " ".join(words), False)


COMMANDS = list(dict.fromkeys(shown()))


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
    for path in PAGES:
        for _, language, block in FENCE.findall(path.read_text(encoding="utf-8")):
            if language == "yaml" and (name := re.match(r"# ([\w-]+\.yaml)\n", block)):
                file = tmp_path / name[1]
                file.write_text(block)
                found[name[1]] = None if "path/to/" in block else file
    return found


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_shown_command_is_known(
    command: Shown, own_files: OwnFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    words = shlex.split(command.text)
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):  # VARIABLE=value before the program
        words.pop(0)
    program = words.pop(0)
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
