"""Forward passes over episodes of an update batch, cut into micro-batches.

Rows are sorted by length before they are cut, so padding stays small. The frozen layers below the
first adapted one run once a batch (`prepare`); every later pass of any role starts from their output.
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
        self.lower: list[Tensor] | None = None
        self.tokens_real = 0
        self.tokens_padded = 0

    def micro_batches(self, rows: Sequence[int]) -> list[list[int]]:
        """Cut rows, shortest first, under the row and padded-token bounds."""
        lengths = self.batch.lengths
        limit = self.micro_rows or len(rows)
        cuts: list[list[int]] = []
        for row in sorted(rows, key=lambda row: (lengths[row], row)):
            full = not cuts or len(cuts[-1]) >= limit
            if full or (
                self.micro_tokens is not None and (len(cuts[-1]) + 1) * lengths[row] > self.micro_tokens
            ):
                cuts.append([])
            cuts[-1].append(row)
        return cuts

    def prepare(self) -> None:
        """Run the frozen layers once for every row, if the model has any below its first adapter."""
        if not self.model.first_adapted:
            return
        stored: list[Tensor] = [torch.empty(0)] * len(self.batch)
        for rows in self.micro_batches(range(len(self.batch))):
            states = self.model.lower(self._pad_ids(rows))
            for number, row in enumerate(rows):
                stored[row] = states[number, : len(self.batch.token_ids[row])].clone()
        self.lower = stored

    def _pad_ids(self, rows: Sequence[int]) -> Tensor:
        tokens = [self.batch.token_ids[row] for row in rows]
        return torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True).to(self.model.device)

    def _pad_lower(self, rows: Sequence[int]) -> Tensor | None:
        if self.lower is None:
            return None
        return torch.nn.utils.rnn.pad_sequence([self.lower[row] for row in rows], batch_first=True)

    def route(self, rows: Sequence[int], roles: Sequence[RolePass]) -> tuple[tuple[str | None, int], ...]:
        return (
            tuple((role.adapter, len(rows)) for role in roles)
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
        copies = len(roles)
        if copies > 1:
            ids = ids.repeat(copies, 1)
            lower = None if lower is None else lower.repeat(copies, 1, 1)
        hidden = self.model.hidden(ids, self.route(rows, roles), lower)
        outputs = []
        for number, role in enumerate(roles):
            outputs.append(
                self._read(hidden[number * len(rows) : (number + 1) * len(rows)], part, role, bootstrap)
            )
        return outputs

    def _read(self, hidden: Tensor, part: UpdateBatch, role: RolePass, bootstrap: bool) -> RoleOutput:
        mask = part.mask.to(hidden.device)
        row_index = torch.arange(len(part), device=hidden.device)[:, None].expand_as(mask)[mask]
        states = hidden[row_index, part.positions.to(hidden.device)[mask]]  # [n, H]
        logprobs = entropies = values = after = None
        if role.score:
            supports = None if part.supports is None else part.supports.to(hidden.device)[mask]
            logp, entropy = self.scorer(states, part.targets.to(hidden.device)[mask], supports)
            logprobs, entropies = _scatter(logp, mask), _scatter(entropy, mask)
        if role.value:
            values = _scatter(self.model.values(states), mask)
            if bootstrap:
                last = torch.tensor(part.lengths, device=hidden.device) - 1
                with torch.no_grad():
                    after = self.model.values(hidden[torch.arange(len(part), device=hidden.device), last])
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


def _scatter(values: Tensor, mask: Tensor) -> Tensor:
    """Flat [n] to [b, N] at the true slots of `mask`, 0 elsewhere."""
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)
