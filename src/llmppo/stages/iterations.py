"""Iterations: several iterations of a chain in one job, which calls `rollout` and `update` in turn.

The files are theirs, byte for byte. Until the last iteration is done they lie in the chain's folder
`unfinished`, because Snakemake deletes the outputs of a job that failed; the next try of the same work goes on
from there.
"""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from llmppo.files import MANIFEST, atomic_folder, digest, read_json, sha256_file, write_sealed
from llmppo.layout import ChainLayout, shards
from llmppo.policies import Prunable, resolve_policy
from llmppo.policies import prune as prune_policy
from llmppo.stages import rollout, update
from llmppo.stages.loading import share_base_weights


def run(
    settings: Mapping[str, Any],
    *,
    base: Path,
    seed: int,
    first: int,
    last: int,
    chain: Path,
    code: str,
    dataset: Path | None = None,
    evaluation: Path | None = None,
    prune: Sequence[tuple[int, Prunable]] = (),
) -> str | None:
    """Run iterations `first` to `last` of the chain in folder `chain`, from policy `first - 1` on.

    `settings` holds those of `rollout` and of `update`. What another `code` or other inputs left unfinished is
    dropped. `evaluation` is that of the first policy, where `stop_at` needs it. `prune` names policies of which
    something goes as soon as no iteration needs it.
    """
    done = ChainLayout(str(chain))
    work = done.unfinished
    start = Path(done.policy(first - 1))
    inputs = [base / MANIFEST, start / MANIFEST, dataset and dataset / MANIFEST, evaluation]
    _take_up(
        Path(work.root),
        digest([dict(settings), code, seed, first, [path and sha256_file(path) for path in inputs]], 64),
    )
    _point_to(resolve_policy(start), Path(work.policy(first)).parent)
    for number, what in prune:
        if number < first:
            prune_policy(Path(done.policy(number)), what)
    summary = None
    # Where vLLM samples, only the update needs the weights here, and the GPU's memory is vLLM's in between.
    vllm = settings["rollout"]["vllm"] is not None
    with nullcontext() if vllm else share_base_weights():
        for iteration in range(first, last + 1):
            if not _finished(work, iteration):
                policy = start if iteration == first else Path(work.policy(iteration - 1))
                common: dict[str, Any] = {
                    "base": base,
                    "policy": policy,
                    "seed": seed,
                    "iteration": iteration,
                }
                rollouts = _rollouts(settings["rollout"], work, dataset=dataset, **common)
                summary = update.run(
                    settings["update"],
                    out=Path(work.policy(iteration)),
                    advantages=Path(work.advantages(iteration)),
                    metrics=Path(work.metrics(iteration)),
                    rollouts=rollouts,
                    evaluation=evaluation if iteration == first else None,
                    **common,
                )
                print(summary, file=sys.stderr, flush=True)
                if vllm and settings["device"] == "cuda":
                    _free_gpu()
            for number, what in prune:
                if first <= number <= iteration - 2:
                    prune_policy(Path(work.policy(number)), what)
    for iteration in range(first, last + 1):
        _publish(Path(work.iteration(iteration)), Path(done.iteration(iteration)))
        _publish(Path(work.policy(iteration)), Path(done.policy(iteration)))
    shutil.rmtree(work.root)
    return summary


def _take_up(folder: Path, key: str) -> None:
    """Keep what a try of the same work left in `folder`; without one, begin with an empty folder."""
    note = folder / "work.json"
    if note.exists() and read_json(note)["key"] == key:
        return
    shutil.rmtree(folder, ignore_errors=True)
    write_sealed(note, {"key": key})


def _point_to(policy: Path, folder: Path) -> None:
    """A link to the policy that a chain may have stopped at: pointers name their target in the same folder."""
    folder.mkdir(exist_ok=True)
    link = folder / policy.name
    link.unlink(missing_ok=True)
    link.symlink_to(policy.resolve())


def _finished(layout: ChainLayout, iteration: int) -> bool:
    """Whether an earlier try wrote all that the update of an iteration writes."""
    files = (layout.policy_manifest(iteration), layout.advantages(iteration), layout.metrics(iteration))
    return all(map(os.path.exists, files))


def _rollouts(
    settings: Mapping[str, Any], layout: ChainLayout, *, iteration: int, **common: Any
) -> list[Path]:
    """The shards of an iteration; those that are there stay."""
    numbers = shards(settings["batch_size"], settings["rollout"]["shard_size"])
    files = [Path(layout.rollout(iteration, number)) for number in numbers]
    for number, file in zip(numbers, files, strict=True):
        if not file.exists():
            told = rollout.run(settings, split="train", iteration=iteration, shard=number, out=file, **common)
            if told is not None:  # a stopped chain samples nothing
                print(told, file=sys.stderr, flush=True)
    return files


def _free_gpu() -> None:
    """Give the memory that an update took back to the device."""
    import gc

    import torch

    gc.collect()
    torch.cuda.empty_cache()


def _publish(source: Path, target: Path) -> None:
    """Give a finished folder its final place; the source stays until all are there."""
    with atomic_folder(target) as folder:
        shutil.copytree(source, folder, copy_function=_link, dirs_exist_ok=True)


def _link(source: str, target: str) -> None:
    """The same file under a second name; a copy where the file system has no such thing."""
    with suppress(OSError):
        os.link(source, target)
        return
    shutil.copy2(source, target)
