"""What a generation engine is: token ids in, token ids and sampled log-probs out.

An engine never sees text, gets one explicit seed for each request, and reports why it stopped. The
sampled end token is part of the reply.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from llmppo.trajectories.episode import StopReason

if TYPE_CHECKING:
    from llmppo.engines.kept import KeptCache


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One reply to sample after `token_ids`; `max_new_tokens` >= 1 already respects the context length.

    An episode that goes on gives the same `kept` with each of its requests; an engine may ignore it.
    """

    token_ids: Sequence[int]
    seed: int
    max_new_tokens: int
    min_new_tokens: int = 0
    kept: "KeptCache | None" = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Sampled ids [n] and their log-probs [n] under the distribution that they were drawn from.

    That is the policy's at the sampling temperature with the logit bias, and what restricts a draw (top-k,
    top-p, min-p, minimum length, repetition penalty) taken into account. Of a greedy reply they are the
    policy's own, NaN where an engine can't tell. `supports[k]` lists, ascending, the ids that top-k, top-p and
    min-p left for token k; None where these are off.
    """

    token_ids: list[int]
    logprobs: NDArray[np.float32]
    stop_reason: (
        StopReason  # EOS, STOP or LENGTH; the harness turns LENGTH into CONTEXT where that was the bound
    )
    supports: list[NDArray[np.int32]] | None = None


class GenerationEngine(Protocol):
    """Samples replies for a batch of requests, all of them together."""

    decode_steps: int  # model calls that sampled a token, over the engine's life

    def generate(self, requests: Sequence[GenerationRequest], *, greedy: bool = False) -> list[Generation]:
        """Replies in the order of the requests."""
        ...
