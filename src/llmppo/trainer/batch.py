"""The update batch: ragged transcripts, and their action tokens on the compressed axis.

`positions` [B, N] holds, for each action token, the index of the token before it: the hidden state
that predicts it, and the state whose value is read. Padded slots have `mask` False.

An episode whose context was restarted has several *segments*, one after the other in `token_ids`. A segment is a
row of its own in a forward pass and knows nothing of those before; the action axis spans them all, and with it
values, advantages and returns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from llmppo.errors import ConfigError, TrajectoryError
from llmppo.trajectories.episode import Episode


@dataclass(frozen=True)
class UpdateBatch:
    """B episodes with at most N action tokens and K turns."""

    episode_ids: list[str]
    token_ids: list[Tensor]  # ragged [T_b], int64
    positions: Tensor  # [B, N]
    targets: Tensor  # [B, N] sampled token ids
    turns: Tensor  # [B, N]
    mask: Tensor  # [B, N]
    rewards: Tensor  # [B, K]
    truncated: Tensor  # [B]
    sampling_logprobs: Tensor | None  # [B, N], NaN where the engine gave none
    segments: list[tuple[int, ...]]  # token counts of each episode's segments
    supports: Tensor | None = None  # [B, N, S] token ids that could be sampled, -1 padded
    skipped_sampling_rows: int = 0

    def __len__(self) -> int:
        return len(self.episode_ids)

    @property
    def lengths(self) -> list[int]:
        return [len(ids) for ids in self.token_ids]

    def rows(self, index: Sequence[int] | Tensor) -> "UpdateBatch":
        """The episodes of `index`, in that order, cut to their longest N."""
        chosen = torch.as_tensor(index, dtype=torch.long)
        mask = self.mask[chosen]
        width = int(mask.sum(dim=1).max()) if len(chosen) else 0
        return UpdateBatch(
            episode_ids=[self.episode_ids[row] for row in chosen.tolist()],
            token_ids=[self.token_ids[row] for row in chosen.tolist()],
            positions=self.positions[chosen, :width],
            targets=self.targets[chosen, :width],
            turns=self.turns[chosen, :width],
            mask=mask[:, :width],
            rewards=self.rewards[chosen],
            truncated=self.truncated[chosen],
            sampling_logprobs=None
            if self.sampling_logprobs is None
            else self.sampling_logprobs[chosen, :width],
            segments=[self.segments[row] for row in chosen.tolist()],
            supports=None if self.supports is None else self.supports[chosen, :width],
            skipped_sampling_rows=self.skipped_sampling_rows,
        )


def build_batch(
    episode_ids: Sequence[str],
    token_ids: Sequence[np.ndarray | Tensor],
    turn_ids: Sequence[np.ndarray | Tensor],
    rewards: Sequence[Sequence[float]] | Tensor,
    truncated: Sequence[bool],
    sampling_logprobs: Sequence[np.ndarray | Tensor | None] | None = None,
    supports: Sequence[np.ndarray | Tensor | None] | None = None,
    segments: Sequence[Sequence[int] | None] | None = None,
) -> UpdateBatch:
    """Assemble a batch. `turn_ids[b]` [T_b] is the turn of each sampled token and -1 elsewhere.

    `segments[b]` holds the token counts of an episode's segments, None or nothing for a single one. A row whose sampling log-probs are None or of another length than its action tokens is counted and
    gets no engine correction. Raises TrajectoryError naming the episode for shapes that can't be right.
    """
    ids = [torch.as_tensor(np.asarray(row), dtype=torch.long).reshape(-1) for row in token_ids]
    turns = [torch.as_tensor(np.asarray(row), dtype=torch.long).reshape(-1) for row in turn_ids]
    where = [torch.nonzero(row >= 0).squeeze(1) for row in turns]
    width = max((len(row) for row in where), default=0)
    count = len(ids)
    num_turns = max((len(row) for row in rewards), default=0) or 1
    layouts = _layouts(episode_ids, ids, segments)
    positions, targets, turn = (torch.zeros(count, width, dtype=torch.long) for _ in range(3))
    mask = torch.zeros(count, width, dtype=torch.bool)
    sampling = torch.full((count, width), float("nan"))
    reward = torch.zeros(count, num_turns)
    skipped = 0
    for row, (name, tokens, labels, at) in enumerate(zip(episode_ids, ids, turns, where, strict=True)):
        if len(labels) != len(tokens):
            raise TrajectoryError(f"{name}: {len(labels)} turn ids for {len(tokens)} tokens")
        n = len(at)
        if n and int(at[0]) == 0:
            raise TrajectoryError(f"{name}: the first token can't be sampled, it has no prefix")
        if set(accumulate(layouts[row])) & set(at.tolist()):
            raise TrajectoryError(f"{name}: the first token of a segment can't be sampled, it has no prefix")
        if bool((labels[at].diff() < 0).any()):
            raise TrajectoryError(f"{name}: turn ids must not decrease along the transcript")
        if n and int(labels.max()) >= len(rewards[row]):
            raise TrajectoryError(
                f"{name}: turn {int(labels.max())} has no reward ({len(rewards[row])} given)"
            )
        positions[row, :n], targets[row, :n], turn[row, :n], mask[row, :n] = (
            at - 1,
            tokens[at],
            labels[at],
            True,
        )
        reward[row, : len(rewards[row])] = torch.as_tensor(rewards[row], dtype=torch.float32)
        if sampling_logprobs is not None:
            given = sampling_logprobs[row]
            if given is None or len(given) != n:
                skipped += 1
            else:
                sampling[row, :n] = torch.as_tensor(np.asarray(given), dtype=torch.float32)
    return UpdateBatch(
        list(episode_ids),
        ids,
        positions,
        targets,
        turn,
        mask,
        reward,
        torch.as_tensor(list(truncated), dtype=torch.bool),
        sampling if sampling_logprobs is not None else None,
        layouts,
        _stack_supports(episode_ids, supports, mask) if supports is not None else None,
        skipped,
    )


def _layouts(
    episode_ids: Sequence[str], token_ids: Sequence[Tensor], segments: Sequence[Sequence[int] | None] | None
) -> list[tuple[int, ...]]:
    if segments is None:
        return [(len(row),) for row in token_ids]
    layouts = []
    for name, tokens, given in zip(episode_ids, token_ids, segments, strict=True):
        layout = (len(tokens),) if given is None else tuple(int(length) for length in given)
        if sum(layout) != len(tokens) or min(layout, default=0) < 1:
            raise TrajectoryError(
                f"{name}: segments of {list(layout)} tokens for {len(tokens)} tokens; give the length of each, 1 or more, in order"
            )
        layouts.append(layout)
    return layouts


def _stack_supports(
    episode_ids: Sequence[str], supports: Sequence[np.ndarray | Tensor | None], mask: Tensor
) -> Tensor:
    rows = [None if row is None else torch.as_tensor(np.asarray(row), dtype=torch.long) for row in supports]
    size = max((row.shape[1] for row in rows if row is not None and row.ndim == 2), default=1)
    stacked = torch.full((*mask.shape, size), -1, dtype=torch.long)
    for number, (name, row) in enumerate(zip(episode_ids, rows, strict=True)):
        if row is None:
            continue
        count = int(mask[number].sum())
        if len(row) != count:
            raise TrajectoryError(f"{name}: sampling supports of {len(row)} tokens, {count} were sampled")
        if count:
            stacked[number, :count, : row.shape[1]] = row
    return stacked


def batch_from_experiences(
    experiences: tuple[Sequence[Tensor], Sequence[Tensor], Tensor],
    turn_ids: Tensor | Sequence[Tensor] | None,
    sampling_logps: Sequence[Tensor | None] | None,
    supports: Sequence[Tensor | None] | None,
    segments: Sequence[Sequence[int] | None] | None,
) -> UpdateBatch:
    """The batch of what `LLMPPO.learn` takes. Raises ConfigError naming the episode for frames that don't fit its tokens."""
    token_ids, action_masks, rewards = experiences
    reward_rows = torch.as_tensor(rewards, dtype=torch.float32)
    reward_rows = reward_rows[:, None] if reward_rows.ndim == 1 else reward_rows
    ids, turns = [], []
    for row, (tokens, mask) in enumerate(zip(token_ids, action_masks, strict=True)):
        sequence, frame = torch.as_tensor(tokens).reshape(-1), torch.as_tensor(mask).reshape(-1).bool()
        if len(frame) != len(sequence) - 1:
            raise ConfigError(
                f"episode {row}: the action mask has {len(frame)} entries for {len(sequence)} tokens; it needs one less than tokens"
            )
        labels = (
            torch.zeros(len(frame), dtype=torch.long)
            if turn_ids is None
            else torch.as_tensor(turn_ids[row]).reshape(-1)[: len(frame)]
        )
        if len(labels) != len(frame) or bool((labels[frame] < 0).any()):
            raise ConfigError(
                f"episode {row}: turn_ids needs a turn (0 or more) for each of the {int(frame.sum())} sampled tokens"
            )
        ids.append(sequence)
        turns.append(torch.cat([torch.tensor([-1]), torch.where(frame, labels, -1)]))
    names = [f"row {row}" for row in range(len(ids))]
    return build_batch(names, ids, turns, reward_rows, [False] * len(ids), sampling_logps, supports, segments)


def batch_from_episodes(episodes: Sequence[Episode], max_turns: int) -> UpdateBatch:
    """The batch of finished episodes; `rewards` has `max_turns` columns. Those whose environment failed are left out."""
    episodes = [episode for episode in episodes if episode.failure is None]
    rewards = [
        [turn.reward for turn in episode.turns] + [0.0] * (max_turns - len(episode.turns))
        for episode in episodes
    ]
    return build_batch(
        [episode.spec.episode_id for episode in episodes],
        [episode.token_ids for episode in episodes],
        [episode.turn_ids for episode in episodes],
        rewards,
        [episode.truncated for episode in episodes],
        [episode.sampling_logprobs for episode in episodes],
        None
        if all(episode.sampling_supports is None for episode in episodes)
        else [padded_supports(episode.sampling_supports) for episode in episodes],
        segments=[episode.segments for episode in episodes],
    )


def padded_supports(supports: Sequence[np.ndarray | None] | None) -> np.ndarray | None:
    """Supports of n tokens as [n, S], -1 padded; a token without one gets only padding."""
    if supports is None:
        return None
    width = max((len(support) for support in supports if support is not None), default=1)
    rows = np.full((len(supports), width), -1, np.int64)
    for row, support in zip(rows, supports, strict=True):
        if support is not None:
            row[: len(support)] = support
    return rows
