"""Episodes as Parquet: one row an episode, sorted by `episode_id`, in the columns of `schema.py`.

The update writes a sibling with the trainer's numbers of each sampled token, on the same token axis. What
is constant over a file stands in its metadata. Writing the same episodes again gives the same bytes.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from llmppo.errors import ArtefactError, LlmppoError, reading
from llmppo.files import canonical_json
from llmppo.trajectories.episode import Episode, EpisodeSpec, StopReason, Turn
from llmppo.trajectories.schema import (
    EPISODE_SCHEMA,
    SCALARS,
    SCHEMA_VERSION,
    SEGMENT_LISTS,
    TOKEN_LISTS,
    TURN_LISTS,
    UPDATE_LISTS,
    UPDATE_SCHEMA,
    list_column,
    list_values,
    open_parquet,
    read_table,
    write_parquet,
)


def write_episodes(path: str | Path, episodes: Sequence[Episode], metadata: Mapping[str, Any]) -> None:
    """Write episodes, any number including none; `metadata` is JSON-able and constant over the file."""
    ordered = _sorted(path, episodes)
    tokens = [len(episode.token_ids) for episode in ordered]
    turns = [len(episode.turns) for episode in ordered]
    masks = [episode.action_mask for episode in ordered]
    token_values: dict[str, Any] = {
        "token_ids": _concatenate([episode.token_ids for episode in ordered], np.int32),
        "action_mask": _concatenate(masks, np.bool_),
        "turn_ids": _concatenate([episode.turn_ids for episode in ordered], np.int16),
        "sampling_logprobs": _scatter([episode.sampling_logprobs for episode in ordered], masks),
        "sampling_supports": _scatter_supports(ordered, masks),
    }
    flat = [turn for episode in ordered for turn in episode.turns]
    turn_values: dict[str, Any] = {
        "turn_starts": [turn.start for turn in flat],
        "turn_ends": [turn.end for turn in flat],
        "turn_rewards": [turn.reward for turn in flat],
        "stop_reasons": [turn.stop_reason.value for turn in flat],
        "invalid": [turn.invalid for turn in flat],
        "observations": [turn.observation for turn in flat],
        "actions": [turn.action for turn in flat],
    }
    scalar_values: dict[str, Any] = {
        "episode_id": [episode.spec.episode_id for episode in ordered],
        "split": [episode.spec.split for episode in ordered],
        "iteration": [episode.spec.iteration for episode in ordered],
        "episode_index": [episode.spec.index for episode in ordered],
        "seed": [episode.spec.seed for episode in ordered],
        "task_id": [episode.task_id for episode in ordered],
        "return": [episode.episode_return for episode in ordered],
        "success": [episode.success for episode in ordered],
        "terminated": [episode.terminated for episode in ordered],
        "truncated": [episode.truncated for episode in ordered],
        "num_turns": turns,
        "num_action_tokens": [episode.num_action_tokens for episode in ordered],
        "info": [canonical_json(dict(episode.info)) for episode in ordered],
        "failure": [episode.failure for episode in ordered],
    }
    columns = {name: pa.array(scalar_values[name], kind) for name, kind in SCALARS.items()}
    columns |= {name: list_column(token_values[name], kind, tokens) for name, kind in TOKEN_LISTS.items()}
    columns |= {name: list_column(turn_values[name], kind, turns) for name, kind in TURN_LISTS.items()}
    columns["segment_starts"] = list_column(
        [start for episode in ordered for start in episode.segment_starts],
        SEGMENT_LISTS["segment_starts"],
        [len(episode.segment_starts) for episode in ordered],
    )
    write_parquet(path, "episodes", EPISODE_SCHEMA, columns, metadata)


def write_update_columns(
    path: str | Path,
    episodes: Sequence[Episode],
    *,
    old_logprobs: Sequence[ArrayLike],
    ref_logprobs: Sequence[ArrayLike] | None,
    values: Sequence[ArrayLike],
    advantages: Sequence[ArrayLike],
    returns: Sequence[ArrayLike],
    metadata: Mapping[str, Any],
) -> None:
    """Write what the update computed, in the order of `episodes`: an array over the [N] sampled tokens of each.

    In the file index t belongs to token t of `token_ids`; other tokens are null, as are NaN and a missing
    reference.
    """
    given = dict(zip(UPDATE_LISTS, (old_logprobs, ref_logprobs, values, advantages, returns), strict=True))
    order = sorted(range(len(episodes)), key=lambda number: episodes[number].spec.episode_id)
    ordered = _sorted(path, episodes)
    masks = [episode.action_mask for episode in ordered]
    lengths = [len(mask) for mask in masks]
    columns = {"episode_id": pa.array([episode.spec.episode_id for episode in ordered], pa.string())}
    for name, arrays in given.items():
        if arrays is None:
            flat = np.full(sum(lengths), np.nan, np.float32)
        else:
            rows = [np.asarray(arrays[number], np.float32) for number in order]
            for episode, row in zip(ordered, rows, strict=True):
                if row.shape != (episode.num_action_tokens,):
                    raise ArtefactError(
                        f"{path}: {name} of {episode.spec.episode_id} has shape {row.shape} for {episode.num_action_tokens} sampled tokens"
                    )
            flat = _scatter(rows, masks)
        columns[name] = list_column(flat, pa.float32(), lengths)
    write_parquet(path, "update", UPDATE_SCHEMA, columns, metadata)


def read_metadata(path: str | Path) -> dict[str, Any]:
    """The `metadata` that the file was written with."""
    facts = open_parquet(path).schema_arrow.metadata or {}
    if b"llmppo.metadata" not in facts:
        raise ArtefactError(f"{path} was not written by llmppo; it has no llmppo.metadata")
    with reading(path):
        return json.loads(facts[b"llmppo.metadata"])


def read_episodes(paths: str | Path | Sequence[str | Path]) -> list[Episode]:
    """Episodes of one or several files, sorted by `episode_id`.

    Raises ArtefactError naming the file, and the episode where one is at fault: another schema or version,
    lists of unequal length, spans that disagree with the masks, an episode that occurs twice.
    """
    files = [paths] if isinstance(paths, (str, Path)) else paths
    origin: dict[str, str | Path] = {}
    episodes: list[Episode] = []
    for path in files:
        for episode in _read_file(path):
            episode_id = episode.spec.episode_id
            if episode_id in origin:
                raise ArtefactError(f"{path}: episode {episode_id} is in {origin[episode_id]} already")
            origin[episode_id] = path
            episodes.append(episode)
    return sorted(episodes, key=lambda episode: episode.spec.episode_id)


def _read_file(path: str | Path) -> list[Episode]:
    table = read_table(path)
    facts = table.schema.metadata or {}
    written = (facts.get(b"llmppo.schema"), facts.get(b"llmppo.schema_version"))
    if written != (b"episodes", str(SCHEMA_VERSION).encode()):
        raise ArtefactError(
            f"{path} holds schema {written}, not episodes of version {SCHEMA_VERSION}; delete it and run the same command"
        )
    if not table.schema.equals(EPISODE_SCHEMA, check_metadata=False):
        raise ArtefactError(f"{path} has other columns or types than episodes of version {SCHEMA_VERSION}")
    with reading(path):
        table.validate(full=True)
        scalars = {name: table.column(name).to_pylist() for name in SCALARS}
        lists = {
            name: list_values(table.column(name), as_numpy=name in TOKEN_LISTS)
            for name in (*TOKEN_LISTS, *TURN_LISTS, *SEGMENT_LISTS)
        }
    episodes = []
    for row, episode_id in enumerate(scalars["episode_id"]):
        try:
            episodes.append(
                _episode(
                    {name: column[row] for name, column in scalars.items()},
                    {name: column[row] for name, column in lists.items()},
                )
            )
        except (LlmppoError, ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
            raise ArtefactError(
                f"{path}, episode {episode_id}: {error}; delete the file and run the same command"
            ) from error
    return episodes


def _episode(scalars: Mapping[str, Any], lists: Mapping[str, Any]) -> Episode:
    for axis, names in (("token", TOKEN_LISTS), ("turn", TURN_LISTS)):
        lengths = {name: len(lists[name]) for name in names}
        if len(set(lengths.values())) > 1:
            raise ArtefactError(f"{axis} lists differ in length: {lengths}")
    mask = lists["action_mask"]
    episode = Episode(
        spec=EpisodeSpec(
            seed=scalars["seed"],
            split=scalars["split"],
            iteration=scalars["iteration"],
            index=scalars["episode_index"],
        ),
        task_id=scalars["task_id"],
        token_ids=lists["token_ids"],
        sampling_logprobs=lists["sampling_logprobs"][mask],
        sampling_supports=_supports(lists["sampling_supports"][mask]),
        turns=tuple(
            Turn(
                start=start,
                end=end,
                reward=reward,
                stop_reason=StopReason(stop_reason),
                invalid=invalid,
                observation=observation,
                action=action,
            )
            for start, end, reward, stop_reason, invalid, observation, action in zip(
                *(lists[name] for name in TURN_LISTS), strict=True
            )
        ),
        terminated=scalars["terminated"],
        truncated=scalars["truncated"],
        success=scalars["success"],
        info=json.loads(scalars["info"]),
        segment_starts=tuple(lists["segment_starts"]),
        failure=scalars["failure"],
    )
    if np.isinf(episode.sampling_logprobs).any():
        raise ArtefactError("sampling_logprobs holds an infinite number")
    expected = {
        "episode_id": episode.spec.episode_id,
        "num_turns": len(episode.turns),
        "num_action_tokens": episode.num_action_tokens,
    }
    for name, value in expected.items():
        if scalars[name] != value:
            raise ArtefactError(f"{name} is {scalars[name]!r}, but the row's other columns say {value!r}")
    if not np.array_equal(lists["turn_ids"], episode.turn_ids) or not np.array_equal(
        mask, episode.action_mask
    ):
        raise ArtefactError("turn_ids or action_mask disagree with turn_starts and turn_ends")
    return episode


def _sorted(path: str | Path, episodes: Sequence[Episode]) -> list[Episode]:
    ordered = sorted(episodes, key=lambda episode: episode.spec.episode_id)
    for first, second in pairwise(ordered):
        if first.spec.episode_id == second.spec.episode_id:
            raise ArtefactError(f"{path}: episode {first.spec.episode_id} occurs twice")
    return ordered


def _concatenate(arrays: Sequence[NDArray[Any]], kind: Any) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, kind), *arrays]).astype(kind, copy=False)


def _scatter(rows: Sequence[NDArray[np.float32]], masks: Sequence[NDArray[np.bool_]]) -> NDArray[np.float32]:
    """Values of the sampled tokens on the token axis of all episodes, NaN elsewhere."""
    mask = _concatenate(masks, np.bool_)
    flat = np.full(len(mask), np.nan, np.float32)
    flat[mask] = _concatenate(rows, np.float32)
    return flat


def _scatter_supports(
    episodes: Sequence[Episode], masks: Sequence[NDArray[np.bool_]]
) -> list[NDArray[np.int32] | None]:
    """Supports of the sampled tokens on the token axis of all episodes, None elsewhere."""
    flat: list[NDArray[np.int32] | None] = [None] * sum(len(mask) for mask in masks)
    start = 0
    for episode, mask in zip(episodes, masks, strict=True):
        if episode.sampling_supports is not None:
            for at, support in zip(np.flatnonzero(mask), episode.sampling_supports, strict=True):
                flat[start + int(at)] = support
        start += len(mask)
    return flat


def _supports(column: NDArray[Any]) -> list[NDArray[np.int32] | None] | None:
    """The supports of an episode's sampled tokens; None where no token has one."""
    return list(column) if any(support is not None for support in column) else None
