"""`make chaos`: small real workflows are hurt in many ways, and must end as if they had not been.

Prints a table, and what was wrong. Exit status 1 for any wrong result, lost stage or unclear error. The same
`--seed` injects the same faults; `--kind` and `--case` repeat one of them.
"""

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from random import Random

for name, value in (
    ("OMP_NUM_THREADS", "1"),
    ("OMP_WAIT_POLICY", "PASSIVE"),
    ("TOKENIZERS_PARALLELISM", "false"),
):
    os.environ[name] = value

import clocks  # noqa: E402, F401
import damage  # noqa: E402, F401
import disks  # noqa: E402, F401
import kills  # noqa: E402, F401
import memory  # noqa: E402, F401
import rewards  # noqa: E402, F401
import rivals  # noqa: E402, F401
import servers  # noqa: E402, F401
import signals  # noqa: E402, F401
import trackers  # noqa: E402, F401
from benches import Bench, Lane, Stage, stages_of  # noqa: E402
from outcomes import KINDS, LOST, UNCLEAR, WRONG, Outcome, Skip  # noqa: E402

LANE: Lane | None = None  # of this process


def open_lane(root: Path, undisturbed: Path, stages: list[Stage]) -> None:
    """In a process of the pool: benches of its own, a warm worker, and how long each stage takes."""
    global LANE
    folder, finished = root / f"lane-{os.getpid()}", Bench(undisturbed)
    LANE = Lane(Bench(folder / "runs", finished), Bench(folder / "stages", finished), stages, {})
    LANE.measure()


def run_case(name: str, number: int, seed: int) -> Outcome | str:
    """One case; why it can't be where that is so."""
    assert LANE is not None
    kind = KINDS[name]
    started = time.monotonic()
    try:
        outcome = kind.run(LANE, Random(f"{seed} {name} {number}"), number)
    except Skip as reason:
        return str(reason)
    except Exception:  # a hang, or what the harness did not expect
        outcome = Outcome(kind.faults, complaints=[(UNCLEAR, traceback.format_exc())])
    outcome.seconds = time.monotonic() - started
    return outcome


def table(outcomes: dict[str, list[Outcome | str]]) -> Iterator[str]:
    columns = ("injected", "recovered to the same hashes", "clear errors", WRONG, LOST, UNCLEAR, "seconds")
    width = max(map(len, outcomes))
    yield f"{'kind':{width}}  " + "  ".join(columns)
    totals = [0] * len(columns)
    for name, found in outcomes.items():
        known = [outcome for outcome in found if isinstance(outcome, Outcome)]
        if not known:
            yield f"{name:{width}}  skipped: {found[0]}"
            continue
        complaints = [what for outcome in known for what, _ in outcome.complaints]
        numbers = [
            sum(outcome.faults for outcome in known),
            sum(outcome.recovered for outcome in known),
            sum(outcome.clear for outcome in known),
            *(complaints.count(what) for what in (WRONG, LOST, UNCLEAR)),
            round(sum(outcome.seconds for outcome in known)),
        ]
        totals = [total + number for total, number in zip(totals, numbers, strict=True)]
        yield f"{name:{width}}  " + "  ".join(f"{n:{len(c)}}" for n, c in zip(numbers, columns, strict=True))
    yield f"{'all':{width}}  " + "  ".join(f"{n:{len(c)}}" for n, c in zip(totals, columns, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", action="store_true", help="a few faults of every kind")
    parser.add_argument("--kind", action="append", help="only kinds whose name contains this; repeatable")
    parser.add_argument("--case", type=int, help="only this case of each kind")
    parser.add_argument("--cases", type=int, help="so many cases of each kind, not its own number")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=40, help="after which no further case begins")
    parser.add_argument("--lanes", type=int, default=2, help="processes of the harness, a core each")
    arguments = parser.parse_args()
    started = time.monotonic()
    jobs = [
        (name, number)
        for name, kind in KINDS.items()
        if not arguments.kind or any(part in name for part in arguments.kind)
        for number in (
            range(arguments.cases or (kind.sample if arguments.sample else kind.cases))
            if arguments.case is None
            else [arguments.case]
        )
    ]
    jobs.sort(key=lambda job: KINDS[job[0]].faults, reverse=True)  # the longest first: lanes end together
    root = Path(tempfile.mkdtemp(prefix="chaos-"))
    try:
        undisturbed = Bench(root / "undisturbed")
        undisturbed.empty()
        ended = undisturbed.run()
        if ended.status:
            sys.exit(ended.text)
        outcomes: dict[str, list[Outcome | str]] = {}
        with ProcessPoolExecutor(
            arguments.lanes,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=open_lane,
            initargs=(root, undisturbed.folder, stages_of(undisturbed)),
        ) as pool:
            waiting = [
                (name, number, pool.submit(run_case, name, number, arguments.seed)) for name, number in jobs
            ]
            for done, (name, number, future) in enumerate(waiting, 1):
                if time.monotonic() - started > 60 * arguments.minutes and future.cancel():
                    outcomes.setdefault(name, []).append("no time was left")
                    continue
                outcome = future.result()
                outcomes.setdefault(name, []).append(outcome)
                for what, text in outcome.complaints if isinstance(outcome, Outcome) else []:
                    print(f"{what}: {name}, case {number}, seed {arguments.seed}: {text}\n", flush=True)
                if sys.stderr.isatty() or done % 10 == 0:
                    print(
                        f"{done}/{len(jobs)} cases, {time.monotonic() - started:.0f} s",
                        file=sys.stderr,
                        flush=True,
                    )
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print("\n".join(table(outcomes)))
    print(f"{time.monotonic() - started:.0f} s, seed {arguments.seed}")
    return int(any(isinstance(o, Outcome) and o.complaints for found in outcomes.values() for o in found))


if __name__ == "__main__":
    sys.exit(main())
