"""The last decoder layer, run only where the state that comes out of it is read.

An update reads the states of sampled tokens only, and the parts of a layer other than attention see each position alone.
Keys and values are needed everywhere, queries only where a state is read.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from llmppo.models.packing import attend_by_row
from llmppo.models.routing import AdapterRouter

WHERE_READ = "sdpa_where_read"
ALONE = ("self_attn.q_proj", "self_attn.o_proj", "mlp")  # in most families


class LastLayer:
    """Replaces the `forward` of those parts of the last layer which it finds; modules and weights stay."""

    def __init__(self, layers: list[nn.Module], router: AdapterRouter) -> None:
        self.router = router
        self.read: Tensor | None = None
        parts = dict(layers[-1].named_modules()) if layers else {}
        self.parts = [parts[name] for name in ALONE if name in parts]
        for part in self.parts:
            part.forward = self._forward(part, part.forward)
        attention: Any = parts.get("self_attn")
        implementation = getattr(getattr(attention, "config", None), "_attn_implementation", None)
        if implementation in ("sdpa", WHERE_READ):  # the latter in a copy of an adapted model
            attention.config = copy.copy(attention.config)
            attention.config._attn_implementation = WHERE_READ
            attention.rows_read = self.rows_read

    def rows_read(self, rows: int, tokens: int) -> Tensor | None:
        """Positions [rows, Q] of a pass that hold all which are read, or None where most or all of them are.

        Every row has as many as the row of which the most are read; the others have some that nothing reads.
        """
        if self.read is None or rows == 1:  # a single row may be packed
            return None
        groups = len(self.router.route)
        read = torch.zeros(rows // groups * tokens, dtype=torch.bool, device=self.read.device)
        read[self.read] = True
        read = read.view(-1, tokens)
        most = int(read.sum(dim=1).max())
        if most > tokens // 2:
            return None
        return read.byte().argsort(dim=1, descending=True, stable=True)[:, :most].repeat(groups, 1)

    @contextmanager
    def at(self, read: Tensor | None) -> Iterator[None]:
        """Run it at the positions `read` [n] (row * T + position) of each group of the route; None is all of them.

        What the parts give is 0 elsewhere, so that states of other positions are not those of the model.
        """
        previous, self.read = self.read, read
        try:
            yield
        finally:
            self.read = previous

    def _forward(self, part: nn.Module, plain: Any) -> Any:
        def forward(x: Tensor, *others: Any, **options: Any) -> Any:
            read, route = self.read, self.router.route
            if read is None or others or options:
                return plain(x, *others, **options)
            tokens = x.flatten(0, 1)
            size = len(tokens) // len(route)
            places = torch.cat([read + group * size for group in range(len(route))])
            counts = [(adapter, len(read)) for adapter, _ in route] if len(route) > 1 else route
            with self.router.using(counts):
                states = plain(tokens.index_select(0, places)[None])
            if not isinstance(states, Tensor):  # some experts also tell how they were chosen
                part.forward = plain  # from now on
                return plain(x)
            result = states.new_zeros(len(tokens), states.shape[-1]).index_copy(0, places, states[0])
            return result.view(*x.shape[:2], -1)

        return forward


def attend_where_read(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """sdpa attention ([B, heads, T, d] to [B, T, heads, d]) of the queries that matter, and 0 for others."""
    rows, _, tokens, _ = query.shape
    places = module.rows_read(rows, tokens)
    causal = attention_mask is None and key.shape[2] == tokens
    if places is None or not (causal or attention_mask is not None):
        return attend_by_row(module, query, key, value, attention_mask, **options)
    asked = places[:, None, :, None]
    if attention_mask is None:
        mask = asked >= torch.arange(tokens, device=asked.device)
    else:
        mask = attention_mask.expand(rows, -1, -1, -1).take_along_dim(asked, dim=2)
    found, _ = attend_by_row(module, query.take_along_dim(asked, dim=2), key, value, mask, **options)
    result = found.new_zeros(rows, tokens, *found.shape[2:])
    return result.scatter(1, places[:, :, None, None].expand_as(found), found), None


AttentionInterface.register(WHERE_READ, attend_where_read)
