"""What the tracker should hold of a chain, from the files alone: entries, params, tags and a table.

An entry is the unit that is logged once: an update, an evaluation or the warm-up. Its digest covers its
numbers and its finish time, and its metrics carry that time as timestamp, so logging it again adds nothing.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmppo.files import digest
from llmppo.reporting.results import Chain, Record
from llmppo.reporting.transcripts import Transcript, pairs_of

MAX_KEY, MAX_PARAM = 250, 6000  # MLflow's limits
SAMPLES = 20

# Keys that may change while a chain goes on, so they are no part of what makes it this chain.
NOT_IDENTITY = ("name", "description", "iterations", "export", "resources")


@dataclass(frozen=True)
class Point:
    """One value of one metric."""

    key: str
    value: float
    timestamp: int  # milliseconds
    step: int


@dataclass(frozen=True)
class Entry:
    """One metrics file: its name in the tracker, what identifies its content, and its points."""

    name: str
    digest: str
    points: tuple[Point, ...]


def legal(key: str) -> str:
    """A metric or param name of the characters and length that MLflow takes."""
    clean = re.sub(r"[^\w./ :-]", "_", key, flags=re.ASCII)
    return clean if len(clean) <= MAX_KEY else f"{clean[: MAX_KEY - 13]}_{digest(key)}"


def _points(metrics: Mapping[str, float], timestamp: int, step: int) -> tuple[Point, ...]:
    return tuple(Point(legal(key), value, timestamp, step) for key, value in sorted(metrics.items()))


def _entry(name: str, record: Record) -> Entry:
    timestamp = round((record.finished_at or 0.0) * 1000)
    content = [record.iteration, timestamp, dict(record.metrics)]
    return Entry(name, digest(content), _points(record.metrics, timestamp, record.iteration))


def chain_entries(chain: Chain) -> dict[str, Entry]:
    """Everything measured so far; names sort in the order of iterations."""
    entries = []
    if chain.warmup is not None:
        warmup = _entry("warmup", chain.warmup)
        timestamp = round((chain.warmup.finished_at or 0.0) * 1000)
        points = list(warmup.points)
        for step, metrics in enumerate(chain.warmup_steps):
            named = {f"warmup/{key}": value for key, value in metrics.items()}
            points += _points(named, timestamp, step)
        content = [warmup.digest, [dict(step) for step in chain.warmup_steps]]
        entries.append(Entry("warmup", digest(content), tuple(points)))
    entries += [_entry(f"update-{record.iteration:04d}", record) for record in chain.updates]
    entries += [_entry(f"evaluation-{record.iteration:04d}", record) for record in chain.evaluations]
    return {entry.name: entry for entry in entries if entry.points}


def config_hash(config: Mapping[str, Any]) -> str:
    """Hash of what makes a chain this chain; extending it keeps the hash."""
    return digest({key: value for key, value in config.items() if key not in NOT_IDENTITY})


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested config as params `section.key`; lists as JSON, long values cut to MLflow's limit."""
    params: dict[str, str] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            params |= flatten(value, f"{name}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
            params[legal(name)] = text if len(text) <= MAX_PARAM else f"{text[: MAX_PARAM - 1]}…"
    return params


def chain_params(config: Mapping[str, Any]) -> dict[str, str]:
    """Params of a run. They can't change later in MLflow, so what may change is not among them."""
    return flatten({key: value for key, value in config.items() if key not in NOT_IDENTITY})


def is_complete(chain: Chain, config: Mapping[str, Any]) -> bool:
    return chain.stopped_at is not None or chain.last_iteration >= int(config["iterations"])


def _text(transcript: Transcript) -> str:
    lines = []
    for step in transcript.steps:
        lines += [
            f"env: {step.observation}",
            f"policy: {step.action}   ({step.reward:+g}, {step.stop_reason})",
        ]
    return "\n".join(lines)


def sample_table(chain: Chain, decoding: str) -> dict[str, Any] | None:
    """Transcripts of the same tasks before and after, in the layout of MLflow's table artefacts."""
    pairs = pairs_of(chain, decoding, SAMPLES)
    if not pairs:
        return None
    policies = (chain.scored[0].iteration, chain.scored[-1].iteration)
    rows: list[Sequence[Any]] = []
    for pair in pairs:
        for policy, transcript in zip(policies, (pair.before, pair.after), strict=True):
            outcome = [transcript.success, transcript.total, len(transcript.steps)]
            rows.append([pair.episode_id, pair.task_id, policy, *outcome, _text(transcript)])
    columns = ["episode_id", "task_id", "policy", "success", "return", "turns", "transcript"]
    return {"columns": columns, "data": rows}
