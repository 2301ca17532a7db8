"""Transcripts of the same evaluation tasks before and after training.

Episodes of two evaluations are paired by their place in the fixed evaluation set. Which pairs are shown is
decided by outcome and then by place, never by looks, so a report does not flatter the run.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmppo.reporting.results import Chain

COLUMNS = ["episode_id", "task_id", "observations", "actions", "turn_rewards", "stop_reasons", "invalid"]
COLUMNS += ["return", "success", "terminated", "truncated"]
KINDS = {
    (False, True): "learned: failed before, succeeds after",
    (False, False): "still fails",
    (True, True): "succeeds before and after",
    (True, False): "lost: succeeded before, fails after",
}
# Outcomes shown, in this order and round again, as long as there are episodes of that kind.
TURNS_OF_KINDS = ((False, True), (False, False), (False, True), (True, False), (True, True))


@dataclass(frozen=True)
class Step:
    """One turn as the page shows it."""

    observation: str
    action: str
    reward: float
    stop_reason: str
    invalid: bool


@dataclass(frozen=True)
class Transcript:
    steps: tuple[Step, ...]
    total: float
    success: bool
    ending: str


@dataclass(frozen=True)
class Pair:
    """One task before and after training."""

    episode_id: str
    task_id: str
    kind: str
    before: Transcript
    after: Transcript


def printable(text: str) -> str:
    """Control characters as visible symbols; line breaks and tabs stay."""
    return "".join(
        chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else "␡" if ord(c) == 127 else c for c in text
    )


def read_episodes(path: Path, columns: list[str]) -> list[dict[str, Any]]:
    """Rows of an episode file, of the named columns that it has, without episodes whose environment failed.

    Raises ArtefactError for a damaged file.
    """
    from llmppo.trajectories.schema import open_parquet, read_table

    known = open_parquet(path).schema_arrow.names
    rows = read_table(path, [name for name in (*columns, "failure") if name in known]).to_pylist()
    return [row for row in rows if row.pop("failure", None) is None]


def _transcript(row: dict[str, Any]) -> Transcript:
    def values(name: str, default: Any) -> list[Any]:
        return list(row.get(name) or [default] * len(row["actions"]))

    steps = tuple(
        Step(printable(observation), printable(action), float(reward), str(reason), bool(wrong))
        for observation, action, reward, reason, wrong in zip(
            values("observations", ""),
            row["actions"],
            values("turn_rewards", 0.0),
            values("stop_reasons", ""),
            values("invalid", False),
            strict=True,
        )
    )
    ending = (
        "truncated" if row.get("truncated") else "ended by the environment" if row.get("terminated") else ""
    )
    return Transcript(steps, float(row.get("return") or 0.0), bool(row["success"]), ending)


def place(episode_id: str) -> str:
    """The part of an episode id that names its place in the evaluation set, whatever the iteration."""
    return episode_id.rpartition("-")[2]


def pick(before: list[dict[str, Any]], after: list[dict[str, Any]], count: int) -> list[Pair]:
    """Up to `count` pairs, outcomes in turn, and of each outcome tasks that were not shown yet first."""
    later = {place(row["episode_id"]): row for row in after}
    pools: dict[tuple[bool, bool], list[tuple[dict[str, Any], dict[str, Any]]]] = {kind: [] for kind in KINDS}
    for row in sorted(before, key=lambda row: row["episode_id"]):
        other = later.get(place(row["episode_id"]))
        if other is not None:
            pools[bool(row["success"]), bool(other["success"])].append((row, other))
    chosen: list[Pair] = []
    seen: set[str] = set()
    while len(chosen) < count and any(pools.values()):
        for kind in TURNS_OF_KINDS:
            if len(chosen) == count or not pools[kind]:
                continue
            fresh = [k for k, (row, _) in enumerate(pools[kind]) if str(row.get("task_id")) not in seen]
            row, other = pools[kind].pop(fresh[0] if fresh else 0)
            seen.add(str(row.get("task_id")))
            chosen.append(
                Pair(
                    row["episode_id"],
                    str(row.get("task_id", "")),
                    KINDS[kind],
                    _transcript(row),
                    _transcript(other),
                )
            )
    return chosen


def pairs_of(chain: Chain, decoding: str, count: int) -> list[Pair]:
    """Pairs from the first and last evaluation of a chain; none where it has fewer than two."""
    files = [chain.evaluation_file(record.iteration, decoding) for record in chain.scored]
    files = [path for path in files if path.is_file()]
    if len(files) < 2 or count < 1:
        return []
    return pick(read_episodes(files[0], COLUMNS), read_episodes(files[-1], COLUMNS), count)


@dataclass(frozen=True)
class Validity:
    """Success of one evaluation, split by whether every answer of an episode was valid."""

    share: float  # of episodes whose every answer was valid
    valid_success: float  # among those; NaN where there are none
    other_success: float  # among the rest; NaN where there are none

    @property
    def success(self) -> float:
        parts = ((self.share, self.valid_success), (1 - self.share, self.other_success))
        return sum(weight * rate for weight, rate in parts if weight > 0)


def _rate(outcomes: list[bool]) -> float:
    return sum(outcomes) / len(outcomes) if outcomes else float("nan")


def validity(chain: Chain, decoding: str, multi_turn: bool) -> dict[int, Validity]:
    """Iteration to the split of its evaluation, where the invalid share was recorded.

    Counted from the episode files. Without them a single-turn evaluation's metrics say the same, since an
    invalid answer is never right: success / (1 - invalid share). With several turns they don't.
    """
    rows: dict[int, Validity] = {}
    for record in chain.scored:
        path = chain.evaluation_file(record.iteration, decoding)
        if "eval/invalid_action_frac" not in record.metrics:
            continue
        if path.is_file():
            split: dict[bool, list[bool]] = {True: [], False: []}
            for row in read_episodes(path, ["success", "invalid"]):
                split[not any(row.get("invalid") or [])].append(bool(row["success"]))
            total = len(split[True]) + len(split[False])
            if total:
                share = len(split[True]) / total
                rows[record.iteration] = Validity(share, _rate(split[True]), _rate(split[False]))
        elif not multi_turn:
            share, success = (
                1 - record.metrics["eval/invalid_action_frac"],
                record.metrics["eval/success_rate"],
            )
            rows[record.iteration] = Validity(share, success / share if share > 0 else float("nan"), 0.0)
    return rows
