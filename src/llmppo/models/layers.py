"""How decoder layers run in the passes of an update: as they are, recomputed in the backward pass, compiled.

Sampling runs them as they are. Weights and modules stay in place: only each layer's `forward` is replaced.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from llmppo.errors import ConfigError

RECOMPILES = (
    32  # of one layer: each adapter, with and without gradient, and shapes until they count as dynamic
)


class LayerRunner:
    """Runs the layers of one decoder. `recompute` and `compiler` (a mode of `torch.compile`) may change at any time."""

    def __init__(self, decoder: nn.Module) -> None:
        found = getattr(decoder, "layers", None)
        self.layers = list(found) if isinstance(found, nn.ModuleList) else []
        self.recompute = False
        self.compiler: str | None = None
        self._in_pass = False
        self._compiled: dict[int, Any] = {}

    def set(self, recompute: bool, compiler: str | None) -> None:
        """Raises ConfigError for a decoder without a list of layers, and for a compiler that isn't there."""
        if (recompute or compiler) and not self.layers:
            name = "gradient_checkpointing" if recompute else "torch_compiler"
            raise ConfigError(f"{name} needs a model with a list of decoder layers; switch it off")
        if compiler is not None and compiler != self.compiler:
            _require_compiler(compiler, self.layers[0])
            self._compiled.clear()
        self.recompute, self.compiler = recompute, compiler
        for number, layer in enumerate(self.layers):
            if (recompute or compiler) and "forward" not in vars(layer):
                layer.forward = self._forward(number, layer.forward)

    def recompile(self) -> None:
        """Forget what was compiled; the next pass compiles anew."""
        self._compiled.clear()

    @contextmanager
    def update_pass(self) -> Iterator[None]:
        """Of a pass of the update, with or without gradient."""
        previous, self._in_pass = self._in_pass, True
        try:
            yield
        finally:
            self._in_pass = previous

    def _forward(self, number: int, plain: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            run = plain
            if self.compiler is not None and self._in_pass:
                run = self._compiled.get(number) or self._compiled.setdefault(number, self._compile(plain))
            if self.recompute and torch.is_grad_enabled():
                # transformers' own switch would need layers in training mode, which refuse the KV cache.
                return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
            return run(*args, **kwargs)

        return forward

    def _compile(self, run: Any) -> Any:
        options: Any = {"recompile_limit": RECOMPILES, "isolate_recompiles": True}  # torch's stubs lack them
        return torch.compile(run, mode=self.compiler, **options)


def _require_compiler(mode: str, layer: nn.Module) -> None:
    modes = torch._inductor.list_mode_options()
    if mode not in modes:
        raise ConfigError(f"torch_compiler: no mode {mode!r}; torch knows {', '.join(sorted(modes))}")
    if next(layer.parameters()).device.type != "cpu":
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ConfigError(
            "torch_compiler needs a C++ compiler on a CPU (g++ or clang++, or one named by CXX); install one, or leave torch_compiler out"
        ) from error
