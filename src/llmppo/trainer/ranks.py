"""The processes of a learn call that `torchrun` started: ranks, which share its micro-batches.

Micro-batches are cut as in one process and dealt out. The layers of the base are sharded over the ranks (FSDP2), so all
must run them equally often: a rank with nothing left to do runs a micro-batch that counts for nothing. Adapters are
whole on every rank, and the gradients of a step are summed, so that a policy doesn't show how many ranks made it.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Ranks:
    """This process among `count` that learn together."""

    number: int = 0
    count: int = 1

    @classmethod
    def current(cls) -> "Ranks":
        """Of the default process group; one rank without it."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        return cls(dist.get_rank(), dist.get_world_size())

    def deal(self, cuts: Sequence[list[int]]) -> Iterator[tuple[list[int], bool]]:
        """This rank's part of the micro-batches `cuts`, each with whether it counts."""
        for start in range(0, len(cuts), self.count):
            mine = start + self.number
            yield (cuts[mine], True) if mine < len(cuts) else (cuts[start], False)

    def sum(self, *tensors: Tensor | None) -> None:
        """Sum tensors of the same shape over the ranks, in place."""
        if self.count > 1:
            for tensor in tensors:
                if tensor is not None:
                    dist.all_reduce(tensor)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum the gradients of whole parameters, which the same ones have on every rank."""
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self.count == 1 or not grads:
            return
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat)
        for grad, summed in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(summed.view_as(grad))

    def gather(self, values: dict[str, float]) -> list[dict[str, float]]:
        """Each rank's `values`, which may have other keys."""
        if self.count == 1:
            return [values]
        found: list[dict[str, float]] = [{}] * self.count
        dist.all_gather_object(found, values)
        return found


@contextmanager
def joined(settings: Mapping[str, Any]) -> Iterator[Ranks]:
    """This process of a stage that runs as `ranks` processes, in a group with the others for as long as the block."""
    if settings.get("ranks", 1) == 1:
        yield Ranks()
        return
    cuda = settings["device"] == "cuda"
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        yield Ranks.current()
    finally:
        dist.destroy_process_group()
