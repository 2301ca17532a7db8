"""What README, docs and config/README.md show: blocks of code, whole files, and commands to type."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[1]
README = REPOSITORY / "README.md"
PAGES = [README, REPOSITORY / "config" / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
SHELLS = ("sh", "bash", "shell", "console")
PLACEHOLDER = re.compile(r"\b[A-Z]{2,}\b|^my\b|^path/to/")  # NAME, my.yaml, path/to/model: a reader's own
INLINE = ("llmppo", "snakemake", "make", "python", "pytest", "pip", "conda")


class Shown(NamedTuple):
    """A line of a fenced shell block, or code within a sentence that begins with a program of `INLINE`."""

    page: str
    text: str
    whole: bool  # a line to be typed; within a sentence it may be only the command's name

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"

    @property
    def words(self) -> list[str]:
        """The program and its arguments, without `VARIABLE=value` before them."""
        words = shlex.split(self.text)
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words.pop(0)
        return words


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of a page in these languages."""
    found = FENCE.findall(page.read_text(encoding="utf-8"))
    return [block for _, language, block in found if language in languages]


def files() -> dict[str, str]:
    """Content by name of the files that pages show in full: their first line is `# study.yaml` or the like."""
    named = {}
    for page in PAGES:
        for block in blocks(page, "python", "yaml"):
            if name := re.match(r"# ([\w-]+\.(?:py|yaml))\n", block):
                named[name[1]] = block
    return named


def lines(block: str) -> Iterator[str]:
    """Commands of a shell block, without comments, continuation lines joined."""
    for line in block.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield shlex.join(words)


def _commands() -> Iterator[Shown]:
    for path in PAGES:
        page = str(path.relative_to(REPOSITORY))
        for block in blocks(path, *SHELLS):
            yield from (Shown(page, line, True) for line in lines(block))
        for code in re.findall(r"`([^`]+)`", FENCE.sub("", path.read_text(encoding="utf-8"))):
            words = code.split()
            if len(words) > 1 and words[0] in INLINE:
                yield Shown(page, " ".join(words), False)


COMMANDS = list(dict.fromkeys(_commands()))


def write_examples(folder: Path) -> None:
    """All `files()`, and a small model in place of `path/to/model`."""
    from llmppo.testing.models import tiny_model, tiny_tokenizer

    for name, content in files().items():
        (folder / name).write_text(content)
    tokenizer = tiny_tokenizer()
    model = tiny_model(layers=1, hidden=16)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    for part in (model, tokenizer):
        part.save_pretrained(folder / "path" / "to" / "model")
