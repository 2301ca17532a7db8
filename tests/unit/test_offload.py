"""`activation_offload`: what moves and what stays, on a device that stands in for the host's memory."""

import pytest
import torch

from llmppo.models.adapted import ACTOR
from llmppo.testing.batches import StepRecorder, made_up_batch, tiny_agent
from llmppo.trainer import offload
from llmppo.trainer.offload import OffloadActivations

IDS = torch.arange(24).reshape(2, 12)


def test_activations_move_and_weights_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moving from a CPU to `meta` shows what would move from a GPU to the host."""
    model = tiny_agent().model
    weights = {weight.untyped_storage().data_ptr() for weight in model.peft.parameters()}
    moved: list[int] = []
    empty = torch.empty

    def counted(shape: torch.Size, **options: object) -> torch.Tensor:
        moved.append(shape.numel())
        return empty(shape, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(offload.torch, "empty", counted)
    saved: list[torch.Tensor] = []
    with (
        OffloadActivations(model.peft.parameters(), to=torch.device("meta")),
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda t: t),
    ):
        model.hidden(IDS, ((ACTOR, -1),))
    # The inner hooks see everything that autograd saves; ours were tried on the same below.
    saved_weights = [t for t in saved if t.untyped_storage().data_ptr() in weights]
    assert saved_weights
    assert not moved
    with OffloadActivations(model.peft.parameters(), to=torch.device("meta")):
        model.hidden(IDS, ((ACTOR, -1),))
    assert len(moved) == len(saved) - len(saved_weights)


def test_gradients_are_the_same_with_it() -> None:
    found = []
    for settings in (
        {},
        {"activation_offload": True},
        {"activation_offload": True, "gradient_checkpointing": True},
    ):
        agent = tiny_agent(update_epochs=2, beta=0.1, **settings)
        recorder = StepRecorder(agent)
        agent.learn(made_up_batch())
        found.append(recorder.actor + recorder.critic)
    for expected, offloaded, recomputed in zip(*found, strict=True):
        assert expected.norm() > 1e-3
        assert torch.equal(offloaded, expected)
        assert (recomputed - expected).norm() <= 1e-5 * expected.norm()
