"""Which LoRA adapter each row of a pass goes through.

Every LoRA layer's forward is replaced by one that reads a shared route: consecutive groups of rows,
each with an adapter name or None for the bare base. The groups of a single packed row are runs of its tokens.
The base layer runs once over all rows. A route must stay set until the backward pass has run, since gradient checkpointing runs the forward again.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from llmppo.errors import ConfigError

Route = Sequence[
    tuple[str | None, int]
]  # (adapter, number of rows, or of tokens in a packed row); a single group may say -1: all of them


Groups = list[tuple[str | None, slice]]  # the same as places among all tokens of a pass


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
                    f"lora target `{name}` is a {type(module).__name__}; plain LoRA on linear layers is supported; "
                    "list others in lora.target_modules, for instance [q_proj, k_proj, v_proj, o_proj]"
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
    full_precision = type(layer.base_layer) is nn.Linear  # not quantised

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        groups = _token_groups(router.route, x)
        if full_precision and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            matrices = [
                matrix.weight
                for name, _ in groups
                if name is not None
                for matrix in (layer.lora_A[name], layer.lora_B[name])
            ]
            return _AdaptedLinear.apply(x, layer, groups, *matrices)
        result = layer.base_layer(x, *args, **kwargs)
        tokens, outputs = x.flatten(0, -2), result.view(-1, result.shape[-1])
        if not torch.is_grad_enabled():  # nothing else holds the base layer's output
            for name, part in groups:
                if name is not None:
                    outputs[part] += _delta(layer, name, tokens[part], result.dtype)
            return result
        pieces = [
            outputs[part] if name is None else outputs[part] + _delta(layer, name, tokens[part], result.dtype)
            for name, part in groups
        ]
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).view_as(result)

    return forward


class _AdaptedLinear(torch.autograd.Function):
    """A linear layer with each group's low-rank branch, added to its output and to its gradient in place.

    y = x W' + b + s (x A') B'. Autograd's own way makes a tensor of full size for each branch, sum and concatenation.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Any, groups: Groups, *matrices: Tensor) -> Tensor:
        result: Tensor = layer.base_layer(x)
        tokens, outputs = x.flatten(0, -2), result.view(-1, result.shape[-1])
        ctx.layer, ctx.shape = layer, x.shape
        ctx.groups = [(name, part) for name, part in groups if name is not None]
        pairs, narrow = iter(matrices), []
        for name, part in ctx.groups:
            down, up = next(pairs), next(pairs)
            narrow.append((tokens[part].to(down.dtype) @ down.T).mul_(layer.scaling[name]))
            _add_product(outputs[part], narrow[-1], up.T)
        ctx.save_for_backward(tokens, *matrices, *narrow)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        tokens, *saved = ctx.saved_tensors
        outputs = gradient.flatten(0, -2)
        inputs = outputs @ ctx.layer.base_layer.weight if ctx.needs_input_grad[0] else None
        count = len(ctx.groups)
        found: list[Tensor | None] = []
        for number, (name, part) in enumerate(ctx.groups):
            down, up, narrow = saved[2 * number], saved[2 * number + 1], saved[2 * count + number]
            after = outputs[part].to(up.dtype)
            before = (after @ up).mul_(ctx.layer.scaling[name])
            if inputs is not None:
                _add_product(inputs[part], before, down)
            trained = ctx.needs_input_grad[3 + 2 * number]
            found += [before.T @ tokens[part].to(down.dtype), after.T @ narrow] if trained else [None, None]
        return None if inputs is None else inputs.view(ctx.shape), None, None, *found


def _token_groups(route: Route, x: Tensor) -> Groups:
    """Adapter of each group of the route, and where its tokens are among all of `x` [B, T, H] or [B * T, H].

    Raises ConfigError for a layer that doesn't see all tokens of the pass, as an expert of a mixture.
    """
    total = x[..., 0].numel()
    if len(route) == 1:
        return [(route[0][0], slice(0, total))]
    counts = [count for _, count in route]
    each, rest = divmod(total, sum(counts))  # tokens of a row; 1 where the rows are packed
    if rest:
        raise ConfigError(
            "lora.target_modules: a layer with an adapter gets only some of a pass's tokens, so that they can't be told apart by "
            "role; leave the experts out, for instance with lora.target_modules: [q_proj, k_proj, v_proj, o_proj]"
        )
    ends = [each * end for end in accumulate(counts)]
    return [(name, slice(end - each * count, end)) for (name, count), end in zip(route, ends, strict=True)]


def _add_product(total: Tensor, first: Tensor, second: Tensor) -> None:
    if total.dtype == first.dtype:
        total.addmm_(first, second)
    else:
        total += (first @ second).to(total.dtype)


def _delta(layer: Any, adapter: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    down, up = layer.lora_A[adapter], layer.lora_B[adapter]
    # Scaled between the two matrices, where there are only `rank` numbers a token.
    narrow = nn.functional.linear(x.to(down.weight.dtype), down.weight) * layer.scaling[adapter]
    return nn.functional.linear(narrow, up.weight).to(dtype)
