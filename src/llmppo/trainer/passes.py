"""Forward passes over episodes of an update batch, cut into micro-batches.

Rows are sorted by length before they are cut, so padding stays small. The frozen layers below the
first adapted one run once a batch (`prepare`); every later pass of any role starts from their output.
`rows` are always episodes; an episode runs as one row for each of its segments, all in the same micro-batch.
With `packing` the rows of a micro-batch are put one after the other into a single row, without padding.
Where the rows of a micro-batch begin with the same tokens, a prompt for instance, those run once for each role.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from llmppo.models.adapted import ACTOR, AdaptedModel
from llmppo.models.head import TokenScorer
from llmppo.models.liger import LigerScorer
from llmppo.models.prefix import common_prefix
from llmppo.trainer.batch import UpdateBatch
from llmppo.trainer.ranks import Ranks

WORTH_SHARING = 0.1  # share of a pass's tokens that a common prefix must save; it takes a pass of its own


@dataclass(frozen=True)
class RoleOutput:
    """What one role's rows gave, per action token [b, N]; bootstrap [b] is the value after the last token.

    Only gradient passes give entropies.
    """

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
        scorer: TokenScorer | LigerScorer,
        batch: UpdateBatch,
        micro_rows: int | None,
        micro_tokens: int | None,
        packing: bool = False,
        ranks: Ranks = Ranks(),
    ) -> None:
        self.model, self.scorer, self.batch, self.ranks = model, scorer, batch, ranks
        self.micro_rows, self.micro_tokens, self.packing = micro_rows, micro_tokens, packing
        self.lower: list[list[Tensor]] | None = None  # of each segment of each episode
        self.tokens_real = 0
        self.tokens_padded = 0
        self.tokens_shared = 0

    def micro_batches(self, rows: Sequence[int]) -> list[list[int]]:
        """Cut rows, shortest first, under the row and padded-token bounds, into one for each rank at least."""
        longest = [max(layout) for layout in self.batch.segments]
        limit = min(self.micro_rows or len(rows), math.ceil(len(rows) / self.ranks.count))
        cuts: list[list[int]] = []
        for row in sorted(rows, key=lambda row: (longest[row], row)):
            full = not cuts or len(cuts[-1]) >= limit
            if full or (
                self.micro_tokens is not None and self._forward_tokens([*cuts[-1], row]) > self.micro_tokens
            ):
                cuts.append([])
            cuts[-1].append(row)
        return cuts

    def _lengths(self, rows: Sequence[int]) -> list[int]:
        """Tokens of each row of a forward pass."""
        return [length for row in rows for length in self.batch.segments[row]]

    def _forward_tokens(self, rows: Sequence[int]) -> int:
        """Tokens that a pass over `rows` computes, padding included."""
        lengths = self._lengths(rows)
        return sum(lengths) if self.packing else len(lengths) * max(lengths)

    def prepare(self) -> None:
        """Run the frozen layers once for every row, if the model has any below its first adapter."""
        if not self.model.first_adapted:
            return
        stored: list[list[Tensor]] = [[] for _ in range(len(self.batch))]
        for rows in self.micro_batches(range(len(self.batch))):
            lengths = self._lengths(rows)
            if self.packing:
                states = self.model.lower(self._ids(rows), lengths)[0].split(lengths)
            else:
                states = self.model.lower(self._ids(rows)).unbind()
            pieces = iter(zip(states, lengths, strict=True))
            for row in rows:
                stored[row] = [
                    state[:length].clone() for state, length in islice(pieces, len(self.batch.segments[row]))
                ]
        self.lower = stored

    def _ids(self, rows: Sequence[int]) -> Tensor:
        return self._join(
            [segment for row in rows for segment in self.batch.token_ids[row].split(self.batch.segments[row])]
        ).to(self.model.device)

    def _lower(self, rows: Sequence[int]) -> Tensor | None:
        return (
            None
            if self.lower is None
            else self._join([segment for row in rows for segment in self.lower[row]])
        )

    def _join(self, segments: list[Tensor]) -> Tensor:
        """Rows of a forward pass [b, T], or [1, T] packed."""
        return torch.cat(segments)[None] if self.packing else pad_sequence(segments, batch_first=True)

    def route(self, rows: Sequence[int], roles: Sequence[RolePass]) -> tuple[tuple[str | None, int], ...]:
        if len(roles) == 1:
            return ((roles[0].adapter, -1),)
        lengths = self._lengths(rows)
        return tuple((role.adapter, sum(lengths) if self.packing else len(lengths)) for role in roles)

    def run(
        self, rows: Sequence[int], roles: Sequence[RolePass], bootstrap: bool = False
    ) -> list[RoleOutput]:
        """One pass over the base for all `roles` together; outputs are cut to the rows' longest N."""
        part = self.batch.rows(rows)
        ids, lower = self._ids(rows), self._lower(rows)
        self.tokens_real += sum(part.lengths) * len(roles)
        self.tokens_padded += ids.numel() * len(roles)
        axis, size = int(self.packing), ids.shape[int(self.packing)]
        if len(roles) > 1:
            ids = torch.cat([ids] * len(roles), dim=axis)
            lower = None if lower is None else torch.cat([lower] * len(roles), dim=axis)
        packed = self._lengths(rows) * len(roles) if self.packing else None
        row, position = (place[part.mask] for place in forward_places(part, part.positions, self.packing))
        shared = self._shared(ids[:size], min(self._lengths(rows)), position)
        self.tokens_shared += shared * (size - 1) * len(roles)
        length = ids.shape[1] - shared
        acted = read = (row * length + position - shared).to(ids.device)
        ends = None
        if bootstrap:
            last = forward_places(part, torch.tensor(part.lengths)[:, None] - 1, self.packing)
            row, position = (place[:, 0] for place in last)
            ends = (row * length + position - shared).to(ids.device)
            read = torch.cat([acted, ends])
        hidden = self.model.hidden(ids, self.route(rows, roles), lower, packed, shared, read)
        return [
            self._read(states.flatten(0, 1), part, role, acted, ends)
            for states, role in zip(hidden.split(size, dim=axis), roles, strict=True)
        ]

    def _shared(self, ids: Tensor, shortest: int, read: Tensor) -> int:
        """Tokens to run once for all rows `ids` [b, T]: none of which a state is `read`, and enough to be worth it."""
        if self.packing or not self.model.shares_prefixes or len(ids) == 1:
            return 0
        shared = common_prefix(ids, min(shortest - 1, int(read.min())))
        return shared if shared * (len(ids) - 1) > WORTH_SHARING * ids.numel() else 0

    def _read(
        self, hidden: Tensor, part: UpdateBatch, role: RolePass, acted: Tensor, ends: Tensor | None
    ) -> RoleOutput:
        """What `role` needs of its hidden states [tokens, H]: those before action tokens and at the episodes' ends."""
        mask = part.mask.to(hidden.device)
        states = hidden.index_select(0, acted)  # [n, H]
        logprobs = entropies = values = after = None
        if role.score:
            supports = None if part.supports is None else part.supports.to(hidden.device)[mask]
            targets = part.targets.to(hidden.device)[mask]
            logp, entropy = self.scorer(states, targets, supports, entropy=torch.is_grad_enabled())
            logprobs = _scatter(logp, mask)
            entropies = None if entropy is None else _scatter(entropy, mask)
        if role.value:
            values = _scatter(self.model.values(states), mask)
            if ends is not None:
                with torch.no_grad():
                    after = self.model.values(hidden.index_select(0, ends))
        return RoleOutput(logprobs, entropies, values, after)

    @torch.no_grad()
    def sweep(self, roles: Sequence[RolePass], bootstrap: bool = False) -> list[RoleOutput]:
        """Every row through `roles` without gradient; outputs [B, N] in the batch's order."""
        count, width = self.batch.mask.shape
        device = self.model.device
        results = [
            RoleOutput(
                torch.zeros(count, width, device=device) if role.score else None,
                None,
                torch.zeros(count, width, device=device) if role.value else None,
                torch.zeros(count, device=device) if role.value and bootstrap else None,
            )
            for role in roles
        ]
        for rows, counts in self.ranks.deal(self.micro_batches(range(count))):
            outputs = self.run(rows, roles, bootstrap)
            for result, output in zip(results, outputs if counts else [], strict=counts):
                for name in ("logprobs", "values"):
                    whole, piece = getattr(result, name), getattr(output, name)
                    if whole is not None:
                        whole[rows, : piece.shape[1]] = piece
                if result.bootstrap is not None and output.bootstrap is not None:
                    result.bootstrap[rows] = output.bootstrap
        for result in results:
            self.ranks.sum(result.logprobs, result.values, result.bootstrap)
        return results

    @property
    def actor(self) -> RolePass:
        """The actor's rows scored; with a head critic they give the values too."""
        return RolePass(ACTOR, score=True, value=self.model.critic == "head")

    @property
    def critic(self) -> RolePass:
        return RolePass(self.model.critic_route, value=True)


def forward_places(part: UpdateBatch, positions: Tensor, packing: bool) -> tuple[Tensor, Tensor]:
    """Row and position [B, n] in a forward pass of the transcripts' `positions` [B, n]."""
    if packing:
        lengths = torch.tensor(part.lengths)
        starts = lengths.cumsum(0) - lengths
        return torch.zeros_like(positions), starts[:, None] + positions
    counts = torch.tensor([len(layout) for layout in part.segments])
    lengths = pad_sequence([torch.tensor(layout) for layout in part.segments], batch_first=True)
    ends = lengths.cumsum(dim=1)  # [B, S]; padded segments are empty and end with the episode
    segment = torch.searchsorted(ends, positions.contiguous(), right=True)
    segment = segment.clamp(max=lengths.shape[1] - 1)
    first_row = counts.cumsum(0) - counts
    return first_row[:, None] + segment, positions - (ends - lengths).gather(1, segment)


def _scatter(values: Tensor, mask: Tensor) -> Tensor:
    """Flat [n] to [b, N] at the true slots of `mask`, 0 elsewhere."""
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)
