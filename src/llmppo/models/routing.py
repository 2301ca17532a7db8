"""Which LoRA adapter each row of a pass goes through.

Every LoRA layer's forward is replaced by one that reads a shared route: consecutive groups of rows,
each with an adapter name or None for the bare base. The groups of a single packed row are runs of its tokens.
The base layer runs once over all rows. A route must stay set until the backward pass has run, since gradient checkpointing runs the forward again.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn

from llmppo.errors import ConfigError

Route = Sequence[
    tuple[str | None, int]
]  # (adapter, number of rows, or of tokens in a packed row); a single group may say -1: all of them


class AdapterRouter:
    """Owns the LoRA layers of one model and the route they all follow."""

    def __init__(self, model: nn.Module) -> None:
        self.route: Route = ((None, -1),)
        self.layers: dict[str, LoraLayer] = {}
        for name, module in model.named_modules():
            if not isinstance(module, LoraLayer):
                continue
            plain = isinstance(module, LoraLinear) or type(module).__name__ in ("Linear4bit", "Linear8bitLt")
            if not plain or any(module.lora_variant.values()):
                raise ConfigError(
                    f"lora target `{name}` is a {type(module).__name__}; plain LoRA on linear layers is supported"
                )
            self.layers[name] = module
            module.forward = _routed_forward(module, self)
        if not self.layers:
            raise ConfigError("lora.target_modules matches no linear layer of the base model")

    @contextmanager
    def using(self, route: Route) -> Iterator[None]:
        """Send rows through `route` inside the block."""
        previous, self.route = self.route, route
        try:
            yield
        finally:
            self.route = previous

    def parameters(self, adapter: str) -> list[nn.Parameter]:
        """The adapter's weights, in a fixed order."""
        found = []
        for layer in self.layers.values():
            found += list(layer.lora_A[adapter].parameters()) + list(layer.lora_B[adapter].parameters())
        return found

    def copy(self, source: str, target: str) -> None:
        """Overwrite one adapter's weights with another's."""
        with torch.no_grad():
            for kept, given in zip(self.parameters(target), self.parameters(source), strict=True):
                kept.copy_(given)


def _routed_forward(layer: Any, router: AdapterRouter) -> Any:
    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result = layer.base_layer(x, *args, **kwargs)
        route = router.route
        if len(route) == 1:
            name = route[0][0]
            if name is None:
                return result
            delta = _delta(layer, name, x, result.dtype)
            return result + delta if torch.is_grad_enabled() else result.add_(delta)
        axis = int(len(x) == 1)  # several groups in one row: it is packed
        counts = [count for _, count in route]
        groups = zip(route, result.split(counts, axis), x.split(counts, axis), strict=True)
        if not torch.is_grad_enabled():  # nothing else holds the base layer's output
            for (name, _), piece, rows in groups:
                if name is not None:
                    piece += _delta(layer, name, rows, result.dtype)
            return result
        return torch.cat(
            [
                piece if name is None else piece + _delta(layer, name, rows, result.dtype)
                for (name, _), piece, rows in groups
            ],
            dim=axis,
        )

    return forward


def _delta(layer: Any, adapter: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    down, up = layer.lora_A[adapter], layer.lora_B[adapter]
    # Scaled between the two matrices, where there are only `rank` numbers a token.
    narrow = nn.functional.linear(x.to(down.weight.dtype), down.weight) * layer.scaling[adapter]
    return nn.functional.linear(narrow, up.weight).to(dtype)
