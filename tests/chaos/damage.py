"""Damaged files: cut off, emptied, or with one bit flipped. They are named, and what is named is made again."""

import re
import subprocess
from functools import partial
from pathlib import Path
from random import Random

import pyarrow.parquet as pq
from benches import BIN, Bench, Ended, Lane, Stage, is_result
from outcomes import UNCLEAR, WRONG, Outcome, kind

from llmppo.errors import ArtefactError
from llmppo.files import SEAL, read_json

ONCE_MORE = re.compile(r"^ +once more: (.*)$", re.MULTILINE)


def damaged(content: bytes, rng: Random) -> bytes:
    how = rng.choice(("flip", "flip", "cut", "emptied"))
    if how == "flip":
        at = rng.randrange(len(content))
        return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
    return content[: rng.randrange(len(content))] if how == "cut" else b""


def candidates(bench: Bench, suffix: str) -> list[Path]:
    """Results with that ending, but for the report, whose files have no reader."""
    files = (path.relative_to(bench.folder) for path in sorted(bench.results.rglob(f"*{suffix}*")))
    return [file for file in files if is_result(str(file)) and "report" not in file.parts]


def harmless(file: Path, before: bytes, after: bytes) -> bool:
    """Whether a reader gets the same from both contents: the bit was in a field that nobody reads."""
    contents = []
    for content in (before, after):
        file.write_bytes(content)
        try:
            if file.suffix == ".parquet":
                table = pq.read_table(file)
                contents.append((table.to_pylist(), table.schema.metadata[b"llmppo.metadata"]))
            else:
                contents.append({name: value for name, value in read_json(file).items() if name != SEAL})
        except ArtefactError:
            return False
    if file.suffix == ".json":  # the key of the checksum is damaged
        contents[1] = {name: contents[1].get(name) for name in contents[0]}
    return contents[0] == contents[1]


def readers(lane: Lane, file: Path) -> list[Stage]:
    """Stages that read a file, themselves or as one of a folder."""
    names = [str(file), *(f"{folder}/manifest.json" for folder in file.parents)]
    found = [stage for stage in lane.repeatable if any(f"{name} " in stage.command for name in names)]
    return [stage for stage in found if not any(name in stage.outputs for name in names)]


def shell(bench: Bench, command: str) -> Ended:
    env = {**bench.environment(), "LLMPPO_WORKER": str(bench.folder / "worker-of-run.log")}
    done = subprocess.run(
        command, shell=True, cwd=bench.folder, env=env, capture_output=True, text=True, timeout=240
    )
    return Ended(done.returncode, done.stdout + done.stderr)


def damaged_file(suffix: str, lane: Lane, rng: Random, number: int) -> Outcome:
    bench, outcome = lane.bench, Outcome()
    bench.finished()
    file = rng.choice(candidates(bench, suffix))
    path, before = bench.folder / file, (bench.folder / file).read_bytes()
    after = damaged(before, rng)
    if reading := readers(lane, file):
        stage = rng.choice(reading)
        path.write_bytes(after)
        bench.drop(stage)
        ended = bench.do(stage)
        if ended.status:
            outcome.told(ended.text, str(file.parent), "delete")
        else:
            outcome.complain(WRONG, [d for d in bench.differences() if not file.match(d.partition(" ")[0])])
        bench.finished()
    path.write_bytes(after)
    told = shell(bench, f"{BIN}/llmppo verify --config chaos.yaml")
    command = ONCE_MORE.search(told.text)
    if not told.status:
        same = harmless(path, before, after)
        outcome.complain(WRONG, [] if same else [f"{file} is damaged, and nobody says so"])
        outcome.recovered = int(same)
        return outcome
    if command is None or str(file.parent) not in told.text:
        outcome.complain(UNCLEAR, [f"{file}: {told.text[-1500:]}"])
        return outcome
    outcome.clear = 1
    again = shell(bench, command[1])
    outcome.ended_well(again, f"{file}, {command[1]}: ")
    outcome.same([f"{file}, {command[1]}: {d}" for d in bench.differences()])
    return outcome


for suffix, title in ((".parquet", "Parquet"), (".safetensors", "safetensors"), (".json", "JSON")):
    kind(f"damaged {title}", cases=20, sample=1)(partial(damaged_file, suffix))
