"""Disks: full ones, in every stage; folders that can only be read; paths that shells and URIs would misread."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random

from benches import CONFIG, HERE, TASK, Bench, Lane
from outcomes import LOST, WRONG, Outcome, Skip, kind

from llmppo.files import read_json

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
        outcome.ended_well(again)
        outcome.same(bench.differences())
    return outcome


@kind("full disk under a run", cases=6, sample=1)
def full_disk_of_run(lane: Lane, rng: Random, number: int) -> Outcome:
    """Working directory, results, and Snakemake's notes on a disk that fills up in the middle of a run."""
    bench, outcome = lane.runs, Outcome()
    bench.empty()
    with mounted(bench.folder, "-t", "tmpfs", "-o", "size=64m", "chaos"):
        for name in (CONFIG, TASK):
            shutil.copy(HERE / name, bench.folder)
        size = 20_000 if number == 0 else rng.randrange(50_000, 5_000_000)
        mount("-o", f"remount,size={size}", bench.folder)
        terminal = bench.folder.parent / "terminal.txt"
        ended = bench.end_run(bench.start_run(terminal=terminal), terminal=terminal)
        before = bench.done(lane.stages)
        if ended.status:
            outcome.told(ended.text, "make room there")
        mount("-o", "remount,size=64m", bench.folder)
        again = bench.end_run(bench.start_run(terminal=terminal), terminal=terminal)
        outcome.complain(LOST, bench.lost(before))
        outcome.ended_well(again)
        outcome.same(bench.differences())
    return outcome


@kind("read-only input", cases=14, sample=2)
def read_only_input(lane: Lane, rng: Random, number: int) -> Outcome:
    """A stage's inputs lie where nothing can be written: it doesn't mind."""
    bench, outcome = lane.bench, Outcome()
    stage = lane.repeatable[number % len(lane.repeatable)]
    bench.without(stage)
    inputs = [
        bench.chain / "policy" / "0002",
        bench.chain / "policy" / "0003",
        *(bench.results / "shared").iterdir(),
    ]
    with ExitStack() as stack:
        for folder in inputs:
            if not any(folder in (bench.folder / file).parents for file in (*stage.outputs, stage.log)):
                stack.enter_context(mounted(folder, "--bind", folder))
                mount("-o", "remount,ro,bind", folder)
        ended = bench.do(stage)
        outcome.ended_well(ended, f"{stage.name}: ")
    outcome.same(bench.differences())
    return outcome


@kind("read-only results", cases=12, sample=2)
def read_only_results(lane: Lane, rng: Random, number: int) -> Outcome:
    bench, outcome = lane.bench, Outcome()
    stage = rng.choice(lane.repeatable)
    bench.without(stage)
    before = bench.others(stage)
    with mounted(bench.results, "--bind", bench.results):
        mount("-o", "remount,ro,bind", bench.results)
        ended = bench.do(stage) if number % 4 else bench.run()
        outcome.told(ended.text, "ead-only file system", "another folder")
    outcome.complain(LOST, bench.lost(before))
    bench.do(stage)
    outcome.same(bench.differences())
    return outcome


ODD = (
    "with space",
    "ünïcødé ∆ 🙂",
    "it's",
    'so "called"',
    "$HOME & co; #1",
    "100% [x]*?",
    "back\\slash",
    "{braces}",
    "~tilde",
    "a/b c/d",
)


@kind("odd results path", cases=len(ODD), sample=1)
def odd_path(lane: Lane, rng: Random, number: int) -> Outcome:
    """A whole run into a folder that shells, URIs or patterns would misread."""
    bench, outcome = lane.runs, Outcome()
    bench.empty()
    name = f"./{ODD[number]}"
    ended = bench.run("--results", name)
    if ended.status:
        outcome.told(ended.text, "results")
        return outcome
    bench.results.parent.joinpath(name).rename(bench.results)
    tracked = read_json(bench.chain / "tracking.json")
    outcome.complain(WRONG, [] if tracked["ok"] else [str(tracked)])
    differences = [
        text for text in bench.differences() if "shared/mlflow" not in text
    ]  # named by the store's URI
    outcome.same([f"{name}: {text}" for text in differences])
    return outcome
