"""Forward passes over episodes of an update batch, cut into micro-batches.

Rows are sorted by length before they are cut, so padding stays small. The frozen layers below the
first adapted one run once a batch (`prepare`); every later pass of any role starts from their output.
`rows` are always episodes; an episode runs as one row for each of its segments, all in the same micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmppo.models.adapted import ACTOR, AdaptedModel
from llmppo.models.head import TokenScorer
from llmppo.trainer.batch import UpdateBatch


@dataclass(frozen=True)
class RoleOutput:
    """What one role's rows gave, per action token [b, N]; bootstrap [b] is the value after the last token."""

    logprobs: Tensor | None = None
    entropies: Tensor | None = None
    values: Tensor | None = None
    bootstrap: Tensor | None = None


@dataclass(frozen=True)
class RolePass:
    """One group of rows in a pass: the adapter they go through and what is read from them."""

    adapter: str | None
    score: bool = False
    value: bool = False


class Passes:
    """Runs role passes over one batch and counts the tokens it saw."""

    def __init__(
        self,
        model: AdaptedModel,
        scorer: TokenScorer,
        batch: UpdateBatch,
        micro_rows: int | None,
        micro_tokens: int | None,
    ) -> None:
        self.model, self.scorer, self.batch = model, scorer, batch
        self.micro_rows, self.micro_tokens = micro_rows, micro_tokens
        self.lower: list[list[Tensor]] | None = None  # of each segment of each episode
        self.tokens_real = 0
        self.tokens_padded = 0

    def micro_batches(self, rows: Sequence[int]) -> list[list[int]]:
        """Cut rows, shortest first, under the row and padded-token bounds."""
        segments = self.batch.segments
        longest = [max(layout) for layout in segments]
        limit = self.micro_rows or len(rows)
        cuts: list[list[int]] = []
        for row in sorted(rows, key=lambda row: (longest[row], row)):
            full = not cuts or len(cuts[-1]) >= limit
            if full or (
                self.micro_tokens is not None
                and self._forward_rows([*cuts[-1], row]) * longest[row] > self.micro_tokens
            ):
                cuts.append([])
            cuts[-1].append(row)
        return cuts

    def _forward_rows(self, rows: Sequence[int]) -> int:
        return sum(len(self.batch.segments[row]) for row in rows)

    def prepare(self) -> None:
        """Run the frozen layers once for every row, if the model has any below its first adapter."""
        if not self.model.first_adapted:
            return
        stored: list[list[Tensor]] = [[] for _ in range(len(self.batch))]
        for rows in self.micro_batches(range(len(self.batch))):
            states = iter(self.model.lower(self._pad_ids(rows)))
            for row in rows:
                stored[row] = [next(states)[:length].clone() for length in self.batch.segments[row]]
        self.lower = stored

    def _pad_ids(self, rows: Sequence[int]) -> Tensor:
        tokens = [
            segment for row in rows for segment in self.batch.token_ids[row].split(self.batch.segments[row])
        ]
        return torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True).to(self.model.device)

    def _pad_lower(self, rows: Sequence[int]) -> Tensor | None:
        if self.lower is None:
            return None
        states = [segment for row in rows for segment in self.lower[row]]
        return torch.nn.utils.rnn.pad_sequence(states, batch_first=True)

    def route(self, rows: Sequence[int], roles: Sequence[RolePass]) -> tuple[tuple[str | None, int], ...]:
        return (
            tuple((role.adapter, self._forward_rows(rows)) for role in roles)
            if len(roles) > 1
            else ((roles[0].adapter, -1),)
        )

    def run(
        self, rows: Sequence[int], roles: Sequence[RolePass], bootstrap: bool = False
    ) -> list[RoleOutput]:
        """One pass over the base for all `roles` together; outputs are cut to the rows' longest N."""
        part = self.batch.rows(rows)
        ids, lower = self._pad_ids(rows), self._pad_lower(rows)
        self.tokens_real += sum(part.lengths) * len(roles)
        self.tokens_padded += ids.numel() * len(roles)
        copies, count = len(roles), len(ids)
        if copies > 1:
            ids = ids.repeat(copies, 1)
            lower = None if lower is None else lower.repeat(copies, 1, 1)
        hidden = self.model.hidden(ids, self.route(rows, roles), lower)
        outputs = []
        for number, role in enumerate(roles):
            outputs.append(self._read(hidden[number * count : (number + 1) * count], part, role, bootstrap))
        return outputs

    def _read(self, hidden: Tensor, part: UpdateBatch, role: RolePass, bootstrap: bool) -> RoleOutput:
        mask = part.mask.to(hidden.device)
        row_index, position = (place.to(hidden.device)[mask] for place in forward_places(part))
        states = hidden[row_index, position]  # [n, H]
        logprobs = entropies = values = after = None
        if role.score:
            supports = None if part.supports is None else part.supports.to(hidden.device)[mask]
            logp, entropy = self.scorer(states, part.targets.to(hidden.device)[mask], supports)
            logprobs, entropies = _scatter(logp, mask), _scatter(entropy, mask)
        if role.value:
            values = _scatter(self.model.values(states), mask)
            if bootstrap:
                last = torch.tensor([layout[-1] for layout in part.segments], device=hidden.device) - 1
                last_row = torch.tensor([len(layout) for layout in part.segments]).cumsum(0) - 1
                with torch.no_grad():
                    after = self.model.values(hidden[last_row.to(hidden.device), last])
        return RoleOutput(logprobs, entropies, values, after)

    @torch.no_grad()
    def sweep(self, roles: Sequence[RolePass], bootstrap: bool = False) -> list[RoleOutput]:
        """Every row through `roles` without gradient; outputs [B, N] in the batch's order."""
        count, width = self.batch.mask.shape
        device = self.model.device
        results = [
            RoleOutput(
                torch.zeros(count, width, device=device) if role.score else None,
                torch.zeros(count, width, device=device) if role.score else None,
                torch.zeros(count, width, device=device) if role.value else None,
                torch.zeros(count, device=device) if role.value and bootstrap else None,
            )
            for role in roles
        ]
        for rows in self.micro_batches(range(count)):
            for result, output in zip(results, self.run(rows, roles, bootstrap), strict=True):
                for name in ("logprobs", "entropies", "values"):
                    whole, piece = getattr(result, name), getattr(output, name)
                    if whole is not None:
                        whole[rows, : piece.shape[1]] = piece
                if result.bootstrap is not None and output.bootstrap is not None:
                    result.bootstrap[rows] = output.bootstrap
        return results

    @property
    def actor(self) -> RolePass:
        """The actor's rows scored; with a head critic they give the values too."""
        return RolePass(ACTOR, score=True, value=self.model.critic == "head")

    @property
    def critic(self) -> RolePass:
        return RolePass(self.model.critic_route, value=True)


def forward_places(part: UpdateBatch) -> tuple[Tensor, Tensor]:
    """Row and position [B, N] of each action's state in a forward pass with a row for each segment."""
    counts = torch.tensor([len(layout) for layout in part.segments])
    lengths = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(layout) for layout in part.segments], batch_first=True
    )
    ends = lengths.cumsum(dim=1)  # [B, S]; padded segments are empty and end with the episode
    segment = torch.searchsorted(ends, part.positions.contiguous(), right=True)
    segment = segment.clamp(max=lengths.shape[1] - 1)
    first_row = counts.cumsum(0) - counts
    return first_row[:, None] + segment, part.positions - (ends - lengths).gather(1, segment)


def _scatter(values: Tensor, mask: Tensor) -> Tensor:
    """Flat [n] to [b, N] at the true slots of `mask`, 0 elsewhere."""
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)
