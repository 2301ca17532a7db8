"""Log-probs by liger-kernel: the same loss and gradients as our own tiles, and refusals where it can't be."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from llmppo.errors import ConfigError
from llmppo.models.head import TokenScorer
from llmppo.models.liger import LigerScorer
from llmppo.testing.batches import StepRecorder, made_up_batch, tiny_agent

pytest.importorskip("liger_kernel")
pytestmark = pytest.mark.filterwarnings("ignore:learn step")  # made-up engine log-probs lie far off

BIAS = {3: 2.0, 40: -1.5}


def learned(**settings: Any) -> tuple[StepRecorder, dict[str, float | None]]:
    agent = tiny_agent(max_output_tokens=8, lr_actor=1e-3, beta=0.05, **settings)
    recorder = StepRecorder(agent)
    return recorder, agent.learn(made_up_batch(sampling=True))


@pytest.mark.parametrize(
    "settings",
    [
        {"importance_sampling_level": "token"},
        {"importance_sampling_level": "turn", "update_epochs": 2, "mini_batch_size": 4},
        {"importance_sampling_level": "trajectory", "temperature": 0.7, "logit_bias": BIAS},
        {"chunk_rows": 3, "critic": "head", "gradient_checkpointing": True},
    ],
    ids=str,
)
def test_loss_and_gradients_are_those_of_our_own_tiles(settings: dict[str, Any]) -> None:
    (ours, ours_metrics), (ligers, ligers_metrics) = (
        learned(**settings),
        learned(**settings, use_liger_loss=True),
    )
    assert ours_metrics["actor/loss"] == pytest.approx(ligers_metrics["actor/loss"], rel=1e-5, abs=1e-7)
    assert len(ours.actor) == len(ligers.actor)
    for expected, got in zip(ours.actor + ours.critic, ligers.actor + ligers.critic, strict=True):
        assert expected.norm() > 1e-3
        assert (got - expected).norm() <= 1e-4 * expected.norm()
    assert ligers_metrics["actor/entropy"] is None
    assert ours_metrics["actor/entropy"] > 0  # type: ignore[operator]


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_scores_go_through_liger(family: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its tiles over the vocabulary is counted, and each log-prob compared."""
    from liger_kernel.chunked_loss import fused_linear_ppo

    tiles: list[int] = []
    forward = fused_linear_ppo._selective_logprob_forward

    def counted(hidden: torch.Tensor, *rest: Any) -> Any:
        tiles.append(len(hidden))
        return forward(hidden, *rest)

    monkeypatch.setattr(fused_linear_ppo, "_selective_logprob_forward", counted)
    head = tiny_agent(family=family).model.head
    states, tokens = torch.randn(10, 16), torch.arange(10)
    options: dict[str, Any] = {"temperature": 0.5, "logit_bias": BIAS, "tile_rows": 4}
    expected, _ = TokenScorer(head, **options)(states, tokens)
    got, entropies = LigerScorer(head, **options)(states, tokens)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert (tiles, entropies) == ([4, 4, 2], None)
    assert len(LigerScorer(head)(states[:0], tokens[:0])[0]) == 0


@pytest.mark.parametrize("family", ["gemma2", "cohere"])
def test_heads_that_change_their_logits_are_refused_when_the_agent_is_made(family: Any) -> None:
    with pytest.raises(ConfigError, match="caps or scales its logits"):
        tiny_agent(family=family, use_liger_loss=True)


def test_what_liger_cannot_do_is_refused() -> None:
    for settings in ({"ent_coef": 0.01}, {"cast_logprobs_to_fp32": False}):
        with pytest.raises(ConfigError, match="use_liger_loss gives no entropies"):
            tiny_agent(use_liger_loss=True, **settings)
    agent = tiny_agent(use_liger_loss=True)
    batch = made_up_batch()
    batch = replace(batch, supports=torch.arange(6).expand(*batch.mask.shape, 6))
    with pytest.raises(ConfigError, match="top_k: 0"):
        agent.learn(batch)
