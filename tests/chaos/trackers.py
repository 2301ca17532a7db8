"""MLflow is down, slow, locked, of another version, or no database at all: nothing but the mirror is late."""

import socket
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

from benches import Bench, Lane
from outcomes import LOST, UNCLEAR, WRONG, Outcome, kind

from llmppo.files import read_json

URI = "sqlite:///results/mlflow.db"
POINTS = """
select metrics.key, value, timestamp, step from metrics where run_uuid not in
(select run_uuid from tags where tags.key = 'superseded_by')
"""


def points(bench: Bench) -> list[tuple[object, ...]]:
    """Every point of the runs that count; one that was logged twice is there twice."""
    with closing(sqlite3.connect(bench.results / "mlflow.db")) as database:
        return sorted(database.execute(POINTS).fetchall())


@contextmanager
def server(answers: bool) -> Iterator[str]:
    """The address of a server that takes connections and says nothing, or of none."""
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        if answers:
            listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def statement(bench: Bench, text: str) -> Iterator[str]:
    """The store after a statement; a lock lasts until the end."""
    with closing(sqlite3.connect(bench.results / "mlflow.db", isolation_level=None)) as database:
        database.execute(text)
        yield URI


@contextmanager
def bytes_instead(bench: Bench, rng: Random) -> Iterator[str]:
    (bench.results / "mlflow.db").write_bytes(rng.randbytes(50_000))
    yield URI


@contextmanager
def folder_instead(bench: Bench) -> Iterator[str]:
    (bench.results / "mlflow.db").unlink()
    (bench.results / "mlflow.db").mkdir()
    yield URI


def faults(bench: Bench, rng: Random) -> dict[str, object]:
    return {
        "down": lambda: server(answers=False),
        "locked": lambda: statement(bench, "begin exclusive"),
        "of another version": lambda: statement(
            bench, "update alembic_version set version_num = 'fffffffffff0'"
        ),
        "without a column": lambda: statement(bench, "alter table experiments rename column name to title"),
        "no database": lambda: bytes_instead(bench, rng),
        "a folder": lambda: folder_instead(bench),
        "slow": lambda: server(answers=True),
    }


@kind("MLflow down, locked, slow or of another version", cases=14, sample=1)
def tracker(lane: Lane, rng: Random, number: int) -> Outcome:
    bench, outcome = lane.bench, Outcome()
    stages = [stage for stage in lane.stages if stage.rule == ("mlflow_init" if number % 2 else "track")]
    stage = stages[0]
    bench.without(stage)
    before = bench.others(stage)
    kept = (bench.results / "mlflow.db").read_bytes()
    names = list(faults(bench, rng))
    name = names[number // 2 % len(names)]
    with faults(bench, rng)[name]() as uri:
        ended = bench.do(replace(stage, command=stage.command.replace(URI, uri)))
    marker = read_json(bench.folder / stage.outputs[0])
    outcome.complain(LOST, bench.lost(before))
    if ended.status or marker["ok"] or "warning" not in ended.text or "Traceback" in ended.text:
        outcome.complain(UNCLEAR, [f"{name}: {marker}, {ended.text[-1500:]}"])
    else:
        outcome.clear = 1
    heal(bench.results / "mlflow.db", kept)
    bench.drop(stage)
    bench.do(stage)
    outcome.complain(WRONG, [] if points(bench) == points(bench.undisturbed) else [f"{name}: other points"])
    outcome.same(bench.differences())
    return outcome


def heal(database: Path, content: bytes) -> None:
    if database.is_dir():
        database.rmdir()
    for path in database.parent.glob("mlflow.db*"):
        path.unlink()
    database.write_bytes(content)
