"""The episode record: one run of an environment, exactly as the model saw it.

`token_ids` holds prompt, replies and observations in the order the model saw them; a turn's tokens
`[start, end)` are the ids that were sampled, never decoded and encoded again. Masks come from these
spans and explicit lengths; nothing is inferred from an id being the pad or end token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmppo.errors import TrajectoryError


class StopReason(StrEnum):
    """Why the sampling of one reply ended."""

    EOS = "eos"  # an end token was sampled; it belongs to the reply
    STOP = "stop"  # a stop string was completed
    LENGTH = "length"  # max_output_tokens was reached
    CONTEXT = "context"  # max_model_len was reached


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One reply: tokens [start, end) of the transcript, and what the environment said of it."""

    start: int
    end: int
    reward: float
    stop_reason: StopReason
    invalid: bool
    observation: str  # the environment text that the reply answers
    action: str  # the reply as the environment received it


@dataclass(frozen=True, kw_only=True)
class EpisodeSpec:
    """What makes one episode reproducible: its place in the experiment, not in a process.

    The environment is reset with `derive_seed(seed, split, iteration, index)`; turn `k` is sampled with
    `derive_seed(seed, split, iteration, index, "turn", k)`.
    """

    seed: int
    split: str  # "train", "warmup" or "eval"
    iteration: int
    index: int

    @property
    def episode_id(self) -> str:
        return f"{self.split}-{self.iteration:04d}-{self.index:05d}"


@dataclass(frozen=True, kw_only=True)
class Episode:
    """A finished episode of T tokens, K turns and N action tokens."""

    spec: EpisodeSpec
    task_id: str
    token_ids: NDArray[np.int32]  # [T]
    sampling_logprobs: NDArray[
        np.float32
    ]  # [N], of the sampled tokens in order; NaN where the engine gave none
    sampling_supports: Sequence[NDArray[np.int32] | None] | None = (
        None  # [N], the ids that each sampled token could be; None where all
    )
    turns: tuple[Turn, ...]
    terminated: bool
    truncated: bool
    success: bool
    info: Mapping[str, Any] = field(default_factory=dict)
    segment_starts: tuple[int, ...] = (0,)  # where the model's context began anew; see `segments`
    failure: str | None = None  # what its environment did wrong; nothing learns from such an episode

    def __post_init__(self) -> None:
        end = 0
        for number, turn in enumerate(self.turns):
            if not (end <= turn.start <= turn.end <= len(self.token_ids)) or (
                turn.start == 0 and turn.end > 0
            ):
                raise TrajectoryError(
                    f"{self.spec.episode_id}: turn {number} spans tokens [{turn.start}, {turn.end}) of {len(self.token_ids)}; spans must be ordered and after the prompt"
                )
            end = turn.end
        starts = self.segment_starts
        if (
            starts[:1] != (0,)
            or any(second <= first for first, second in pairwise(starts))
            or (len(starts) > 1 and starts[-1] >= len(self.token_ids))
            or any(turn.start <= start < turn.end for turn in self.turns for start in starts)
        ):
            raise TrajectoryError(
                f"{self.spec.episode_id}: segments can't start at {list(starts)} of {len(self.token_ids)} tokens; they start at 0, increase, and begin with a token that wasn't sampled"
            )
        if len(self.sampling_logprobs) != self.num_action_tokens:
            raise TrajectoryError(
                f"{self.spec.episode_id}: {len(self.sampling_logprobs)} sampling log-probs for {self.num_action_tokens} sampled tokens"
            )
        if self.sampling_supports is not None and len(self.sampling_supports) != self.num_action_tokens:
            raise TrajectoryError(
                f"{self.spec.episode_id}: {len(self.sampling_supports)} sampling supports for {self.num_action_tokens} sampled tokens"
            )

    @property
    def episode_return(self) -> float:
        return float(sum(turn.reward for turn in self.turns))

    @property
    def segments(self) -> tuple[int, ...]:
        """Token counts of the segments: what the model saw before a token is its own segment up to it."""
        return tuple(end - start for start, end in pairwise((*self.segment_starts, len(self.token_ids))))

    @property
    def num_action_tokens(self) -> int:
        return sum(turn.end - turn.start for turn in self.turns)

    @property
    def turn_ids(self) -> NDArray[np.int16]:
        """[T] turn number of each sampled token, -1 elsewhere."""
        ids = np.full(len(self.token_ids), -1, np.int16)
        for number, turn in enumerate(self.turns):
            ids[turn.start : turn.end] = number
        return ids

    @property
    def action_mask(self) -> NDArray[np.bool_]:
        """[T] true where the token was sampled by the policy, end tokens included."""
        return self.turn_ids >= 0
