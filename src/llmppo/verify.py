"""`llmppo verify`: whether a results folder holds what its manifests say, and whether a stage gives the same again."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from llmppo.errors import ArtefactError, LlmppoError
from llmppo.files import MANIFEST, check_manifest, read_json, read_sealed_text, sha256_file
from llmppo.ownership import HOME, near
from llmppo.policies import may_be_pruned
from llmppo.run import snakemake_command

# What a repeat writes anew without being a result: the tracker's store, logs, and where a run is at home.
NOT_COPIED = ("mlflow.db*", "mlartifacts", "logs", "benchmarks", HOME, ".run.lock")
TIMED_FACTS = ("finished_at",)
TIMED_METRICS = ("time/", "perf/")


@dataclass(frozen=True)
class Checked:
    """One artefact, and what is wrong with it (None: nothing)."""

    path: Path
    fault: str | None = None


def check(results: Path) -> Iterator[Checked]:
    """Every folder with a manifest, every Parquet file, every other JSON file and every chain's config below `results`."""
    if not results.is_dir():
        raise LlmppoError(f"{results} is no folder; give the folder of an experiment, or the results root")
    paths = [path for path in sorted(results.rglob("*")) if not _hidden(path, results)]
    covered = {path.parent for path in paths if path.name == MANIFEST}
    for path in paths:
        if path in covered:
            yield _checked(path, _check_folder)
        elif covered.isdisjoint(path.parents) and path.is_file():
            look = next((look for pattern, look in CHECKS.items() if path.match(pattern)), None)
            if look is not None:
                yield _checked(path, look)


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _checked(path: Path, look: Callable[[Path], Any]) -> Checked:
    try:
        look(path)
    except (ArtefactError, KeyError, TypeError, AttributeError) as error:
        return Checked(
            path, str(error) if isinstance(error, ArtefactError) else f"{path} is no manifest of ours"
        )
    return Checked(path)


def _check_folder(folder: Path) -> None:
    check_manifest(folder, may_be_pruned(folder))


def _read_parquet(path: Path) -> None:
    from llmppo.trajectories.schema import check_table

    check_table(path)


CHECKS: dict[str, Callable[[Path], Any]] = {
    "*.parquet": _read_parquet,
    "*.json": read_json,
    "seed-*/config.yaml": read_sealed_text,
}


@dataclass(frozen=True)
class Repeat:
    """Files that one stage wrote again, and those of them that differ from the results."""

    written: list[str]
    different: list[str]


def repeat(values: dict[str, Any], results: str, target: Path, snakefile: Path) -> Repeat:
    """Run the stage that makes `target` again, in a copy of the results (hard links), and compare its files.

    `values` are those of the experiment, `results` their output root. Clock readings in metrics don't count.
    Raises LlmppoError where the file isn't a result, or the stage fails.
    """
    root, file = Path(results).absolute(), target.absolute()
    if not file.is_file() or root not in file.parents:
        raise LlmppoError(f"{target} is no file below {results}; name one that the experiment has written")
    with tempfile.TemporaryDirectory(prefix=".verify-", dir=root.parent) as folder:
        copy = Path(folder) / root.name
        shutil.copytree(root, copy, copy_function=os.link, ignore=shutil.ignore_patterns(*NOT_COPIED))
        wanted = near(str(copy / _made_as(file, root).relative_to(root)))
        config = Path(folder) / "config.yaml"
        config.write_text(yaml.safe_dump({**values, "results": near(str(copy))}), encoding="utf-8")
        ran = subprocess.run(
            [
                *snakemake_command(snakefile), "--nolock", "--workflow-profile", "none", "--configfile", str(config), "--force", "--rerun-triggers", "mtime",
                "--drop-metadata", "--show-failed-logs", wanted,
            ],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        if ran.returncode:
            raise LlmppoError(f"the stage that makes {target} failed:\n{ran.stdout[-3000:]}")
        return _compare(root, copy)


def _made_as(file: Path, root: Path) -> Path:
    """The file by which the workflow knows what made `file`: of a folder with a manifest that is the manifest."""
    folders = [folder for folder in file.parents if root in folder.parents]
    return next((folder / MANIFEST for folder in folders if (folder / MANIFEST).is_file()), file)


def _compare(root: Path, copy: Path) -> Repeat:
    written, different = [], []
    for path in sorted(copy.rglob("*")):
        original = root / path.relative_to(copy)
        if (
            not path.is_file()
            or _hidden(path, copy)
            or {"logs", "benchmarks"} & set(path.relative_to(copy).parts)
        ):
            continue
        if original.is_file() and original.samefile(path):
            continue
        written.append(str(original))
        if not original.is_file() or not same_content(original, path):
            different.append(str(original))
    return Repeat(written, different)


def same_content(first: Path, second: Path) -> bool:
    """Equal bytes; of metrics files equal content without clock readings."""
    if sha256_file(first) == sha256_file(second):
        return True
    if first.name != "metrics.json":
        return False
    contents: Sequence[Any] = [_without_times(read_json(path)) for path in (first, second)]
    return json.dumps(contents[0], sort_keys=True) == json.dumps(contents[1], sort_keys=True)


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: _without_times(entry)
            for name, entry in value.items()
            if name not in TIMED_FACTS and not str(name).startswith(TIMED_METRICS)
        }
    return [_without_times(entry) for entry in value] if isinstance(value, list) else value
