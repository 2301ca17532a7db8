"""Reading the peer's vectors: action-frame tensors [B, T-1] to our compressed axis [B, N], and back."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VECTORS = Path(__file__).with_name("peer-vectors.json")


@cache
def vectors() -> dict[str, Any]:
    return json.loads(VECTORS.read_text(encoding="utf-8"))


def cases(kind: str | None = None) -> list[dict[str, Any]]:
    return [case for case in vectors()["cases"] if kind in (None, case["kind"])]


def by_id(name: str) -> dict[str, Any]:
    (found,) = [case for case in cases() if case["id"] == name]
    return found


def close(ours: Any, theirs: Any) -> None:
    """Compare within the tolerance that the file suggests."""
    tolerance = vectors()["suggested_tolerance"]
    torch.testing.assert_close(
        torch.as_tensor(ours, dtype=torch.float32),
        torch.as_tensor(theirs, dtype=torch.float32),
        rtol=tolerance["rtol"],
        atol=tolerance["atol"],
    )


class Frame:
    """The action positions of a case. `turns` and `mask` are on the compressed axis."""

    def __init__(self, case: dict[str, Any]) -> None:
        inputs = case["inputs"]
        self.inputs = inputs
        self.turn_ids = torch.tensor(inputs["turn_ids"])  # [B, T-1]
        self.where = torch.tensor(inputs.get("action_mask", (self.turn_ids >= 0).tolist()))
        self.width = max(int(self.where.sum(1).max()), 1)
        self.mask = torch.arange(self.width)[None] < self.where.sum(1, keepdim=True)  # [B, N]
        self.turns = self.compress(self.turn_ids)
        self.num_turns = int(self.turn_ids.max()) + 1

    def compress(self, values: Any, garbage: float | None = None) -> Tensor:
        """[B, T-1] to [B, N]; `garbage` fills the masked slots."""
        frame = torch.as_tensor(values)
        packed = torch.zeros(self.mask.shape, dtype=frame.dtype)
        if garbage is not None:
            packed.fill_(garbage)
        return packed.masked_scatter(self.mask, frame[self.where])

    def take(self, name: str, garbage: float | None = float("nan")) -> Tensor:
        """An input tensor on the compressed axis, NaN in its masked slots."""
        return self.compress(torch.tensor(self.inputs[name], dtype=torch.float32), garbage)

    def expand(self, packed: Tensor) -> Tensor:
        """[B, N] back to [B, T-1], 0 outside the mask."""
        frame = torch.zeros(self.where.shape, dtype=packed.dtype)
        return frame.masked_scatter(self.where, packed[self.mask])
