"""Choosing tokens from logits with explicit random streams, so that a draw has no hidden state.

`B` rows, `V` vocabulary. *Scores* are logits / temperature + logit_bias; the log-prob of a token is that of
softmax over what it was drawn from: the scores after the repetition penalty, the minimum length and top-k,
top-p and min-p, in this order. A greedy token takes that of softmax(scores). A token with weight 0 is never drawn.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from llmppo.engines.base import GenerationRequest
from llmppo.models.head import bias_row


class UniformStreams:
    """Endless uniforms of several requests; a stream depends on its request's seed alone.

    Philox, since torch's CPU generator keeps only 32 bits of a seed.
    """

    BLOCK = 64

    def __init__(self, seeds: Sequence[int]) -> None:
        self._generators = [np.random.Generator(np.random.Philox(key=seed)) for seed in seeds]

    def block(self) -> Tensor:
        """The next [B, BLOCK] uniforms in [0, 1), float64."""
        return torch.from_numpy(np.stack([generator.random(self.BLOCK) for generator in self._generators]))

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        self._generators = [self._generators[row] for row in rows]


def penalize_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide positive and multiply negative logits of tokens `seen` [B, V] (CTRL, Keskar et al. 2019, eq. 1)."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def restrict(scores: Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """Scores [B, V] with -inf outside top-k, then outside the nucleus of top-p, then below min-p.

    Ties at a border stay. 0, 1 and 0 are off.
    """
    if 0 < top_k < scores.shape[-1]:
        least = scores.topk(top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if top_p < 1.0:
        ordered = scores.sort(dim=-1, descending=True).values
        probabilities = ordered.softmax(dim=-1)
        # The nucleus: tokens whose likelier ones sum to less than top_p, so the likeliest always belongs.
        inside = probabilities.cumsum(dim=-1) - probabilities < top_p
        least = ordered.masked_fill(~inside, torch.inf).amin(dim=-1, keepdim=True)
        scores = scores.masked_fill(scores < least, -torch.inf)
    if min_p > 0.0:
        least = scores.amax(dim=-1, keepdim=True) + torch.log(torch.tensor(min_p))
        scores = scores.masked_fill(scores < least, -torch.inf)
    return scores


def draw(scores: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse-CDF sample [B] of softmax(scores [B, V]) at `uniforms` [B] in [0, 1).

    The sum runs in float64; the first index whose cumulated weight exceeds u times the total has a weight
    above 0.
    """
    weights = (scores - scores.amax(dim=-1, keepdim=True)).exp()
    cumulated = weights.cumsum(dim=-1, dtype=torch.float64)
    targets = uniforms[:, None] * cumulated[:, -1:]
    return torch.searchsorted(cumulated, targets, right=True).squeeze(-1).clamp_(max=scores.shape[-1] - 1)


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """What a sampler does to logits; 0 (top_k, min_p) and 1 (the others) are off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)


class BatchSampler:
    """Chooses the next token of each row of a shrinking batch."""

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        settings: SamplingSettings,
        end_token_ids: Collection[int],
        *,
        greedy: bool,
        device: torch.device,
    ) -> None:
        self._settings, self._device, self._step = settings, device, 0
        self._prompts = [request.token_ids for request in requests]
        self._end_tokens = torch.tensor(sorted(end_token_ids), dtype=torch.long, device=device)
        self._fewest = torch.tensor([request.min_new_tokens for request in requests], device=device)
        self._longest_minimum = max(request.min_new_tokens for request in requests)
        self._streams = None if greedy else UniformStreams([request.seed for request in requests])
        self._uniforms = torch.empty(0)
        self._bias: Tensor | None = None
        self._seen: Tensor | None = None

    @property
    def restricts(self) -> bool:
        """Whether top-k, top-p or min-p bound what is drawn."""
        settings = self._settings
        return self._streams is not None and (
            settings.top_k > 0 or settings.top_p < 1.0 or settings.min_p > 0.0
        )

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The next token [B] of each row, its log-prob [B] and what it was drawn from [B, V], -inf where
        nothing could be, from fp32 logits [B, V]."""
        if self._step == 0:
            self._allocate(logits.shape[-1])
        scores = drawn_from = self._scores(logits)
        if self._seen is not None:
            drawn_from = self._scores(
                penalize_repetition(logits, self._seen, self._settings.repetition_penalty)
            )
        if self._step < self._longest_minimum:
            too_early = (self._step < self._fewest)[:, None]
            held_back = drawn_from[:, self._end_tokens].masked_fill(too_early, -torch.inf)
            drawn_from = drawn_from.index_copy(1, self._end_tokens, held_back)
        if self._streams is None:
            tokens = drawn_from.argmax(dim=-1)
            drawn_from = scores
        else:
            offset = self._step % UniformStreams.BLOCK
            if offset == 0:
                self._uniforms = self._streams.block().to(self._device)
            drawn_from = restrict(
                drawn_from,
                top_k=self._settings.top_k,
                top_p=self._settings.top_p,
                min_p=self._settings.min_p,
            )
            tokens = draw(drawn_from, self._uniforms[:, offset])
        column = tokens[:, None]
        if self._seen is not None:
            self._seen.scatter_(1, column, True)
        self._step += 1
        return tokens, drawn_from.gather(1, column).squeeze(1) - drawn_from.logsumexp(dim=-1), drawn_from

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only."""
        self._fewest = self._fewest[rows]
        if self._seen is not None:
            self._seen = self._seen[rows]
        if self._streams is not None:
            self._streams.keep(rows.tolist())
            self._uniforms = self._uniforms[rows]

    def _scores(self, logits: Tensor) -> Tensor:
        scores = logits if self._settings.temperature == 1.0 else logits / self._settings.temperature
        return scores if self._bias is None else scores + self._bias

    def _allocate(self, vocabulary: int) -> None:
        if self._settings.logit_bias:
            self._bias = bias_row(self._settings.logit_bias, vocabulary).to(self._device)
        if self._settings.repetition_penalty != 1.0:
            self._seen = torch.zeros(len(self._prompts), vocabulary, dtype=torch.bool, device=self._device)
            for row, prompt in enumerate(self._prompts):
                self._seen[row, torch.as_tensor(prompt, device=self._device)] = True
