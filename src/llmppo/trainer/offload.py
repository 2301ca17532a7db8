"""Activations kept for the backward pass wait in host memory instead of the GPU's.

As `torch.autograd.graph.save_on_cpu`, but weights that autograd refers to stay where they are: a frozen base
would be copied to the host by every pass.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class OffloadActivations(saved_tensors_hooks):
    """Context of a forward pass whose saved activations move to `to`, pinned where they come from a GPU."""

    def __init__(self, weights: Iterable[Tensor], to: torch.device | None = None) -> None:
        target = to or torch.device("cpu")
        kept = {weight.untyped_storage().data_ptr() for weight in weights}

        def pack(tensor: Tensor) -> tuple[torch.device, Tensor]:
            if tensor.device == target or tensor.untyped_storage().data_ptr() in kept:
                return tensor.device, tensor
            host = torch.empty(tensor.shape, dtype=tensor.dtype, device=target, pin_memory=tensor.is_cuda)
            return tensor.device, host.copy_(tensor, non_blocking=tensor.is_cuda)

        def unpack(packed: tuple[torch.device, Tensor]) -> Tensor:
            device, tensor = packed
            return tensor.to(device, non_blocking=device.type == "cuda")

        super().__init__(pack, unpack)
