"""Disks: full ones, in every stage; folders that can only be read; paths that shells and URIs would misread."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from benches import Bench, Lane
from outcomes import LOST, WRONG, Outcome, Skip, kind

PAGE = 4096


def mount(*arguments: object) -> None:
    done = subprocess.run(["mount", *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        raise Skip(f"mounting isn't allowed here: {done.stderr.strip()}")


@contextmanager
def mounted(folder: Path, *arguments: object) -> Iterator[None]:
    mount(*arguments, folder)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def small_disk(bench: Bench) -> Iterator[None]:
    """The results of the bench on a disk of their own, large as yet."""
    full = bench.results.rename(bench.folder / "moved")
    bench.results.mkdir()
    with mounted(bench.results, "-t", "tmpfs", "-o", "size=64m", "chaos"):
        subprocess.run(["cp", "-a", f"{full}/.", str(bench.results)], check=True)
        yield


def leave(bench: Bench, room: int) -> None:
    """Let the disk of the results have `room` bytes left."""
    status = os.statvfs(bench.results)
    used = (status.f_blocks - status.f_bfree) * status.f_frsize
    mount("-o", f"remount,size={used + room}", bench.results)


@kind("full disk", cases=57, sample=5)
def full_disk(lane: Lane, rng: Random, number: int) -> Outcome:
    """The disk is full when a stage writes its first byte, or somewhere on the way."""
    bench, outcome = lane.bench, Outcome()
    stage = lane.repeatable[number % len(lane.repeatable)]
    bench.finished()
    written = sum(path.stat().st_size + PAGE for path in bench.written_by(stage))
    with small_disk(bench):
        bench.drop(stage)
        (bench.folder / stage.log).unlink(missing_ok=True)
        before = bench.others(stage)
        leave(bench, rng.choice((0, rng.randrange(0, written, PAGE))))
        ended = bench.do(stage)
        outcome.complain(LOST, bench.lost(before))
        outcome.complain(WRONG, bench.altered())
        if ended.status:
            outcome.told(ended.text, "No space left on device")
        mount("-o", "remount,size=64m", bench.results)
        again = bench.do(stage)
        outcome.complain(WRONG, [again.text[-1500:]] if again.status else [])
        outcome.same(bench.differences())
    return outcome
