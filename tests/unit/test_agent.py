"""The agent's bookkeeping: settings as attributes, clones, action sampling."""

import pytest
import torch

from llmppo import LLMPPO
from llmppo.errors import ConfigError
from llmppo.testing.models import tiny_model


def agent(**settings: object) -> LLMPPO:
    model = tiny_model(seed=3)
    model.generation_config.eos_token_id = 5
    return LLMPPO(
        0, "<pad>", actor_network=model, seed=1, batch_size=2, lr_actor=1e-2, max_output_tokens=6, **settings
    )


def experience() -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    ids = [torch.tensor([[7, 8, 9, 10]]), torch.tensor([[7, 8, 11]])]
    masks = [torch.tensor([[False, True, True]]), torch.tensor([[False, True]])]
    return ids, masks, torch.tensor([1.0, 0.0])


def weights(of: LLMPPO) -> list[torch.Tensor]:
    return [
        parameter.detach().clone() for role in ("actor", "critic") for parameter in of.model.parameters(role)
    ]


def test_a_clone_goes_on_exactly_as_its_original_and_on_its_own() -> None:
    first = agent()
    first.learn(experience())
    twin = first.clone(index=4)
    assert (twin.index, first.index, twin.learn_steps) == (4, 0, 1)
    before = weights(twin)
    first.learn(experience())
    assert all(torch.equal(kept, now) for kept, now in zip(before, weights(twin), strict=True))
    twin.learn(experience())
    assert all(torch.equal(a, b) for a, b in zip(weights(first), weights(twin), strict=True))


def test_settings_are_attributes_and_checked_when_set() -> None:
    made = agent()
    made.clip_coef = 0.1
    assert made.clip_coef == made.config.clip_coef == 0.1
    with pytest.raises(ConfigError, match="clip_coef"):
        made.clip_coef = -1.0
    with pytest.raises(ConfigError, match="did you mean `clip_coef`"):
        agent(clip_coeff=0.2)
    with pytest.raises(ConfigError, match="critic is fixed"):
        made.critic = "head"
    with pytest.raises(AttributeError):
        _ = made.clip_coeff


def test_get_action_returns_reply_ids_masks_and_logprobs() -> None:
    made = agent()
    prompts = [{"input_ids": torch.tensor([[7, 8, 9]])}, {"input_ids": torch.tensor([[7, 8]])}]
    sampled = made.get_action(prompts)
    assert sampled.sampling_logps is not None
    for prompt, ids, mask, logps in zip(
        prompts, sampled.token_ids, sampled.action_masks, sampled.sampling_logps, strict=True
    ):
        length = prompt["input_ids"].shape[1]
        assert torch.equal(ids[:, :length], prompt["input_ids"])
        assert mask.sum() == ids.shape[1] - length == len(logps)
        assert bool(mask[0, length - 1 :].all())
    greedy = [made.get_action(prompts, training=False) for _ in range(2)]
    assert greedy[0].sampling_logps is None
    assert all(torch.equal(a, b) for a, b in zip(greedy[0].token_ids, greedy[1].token_ids, strict=True))


def test_learning_rates_follow_settings() -> None:
    made = agent()
    made.update_lr((1e-3, None))
    assert (made.current_lr, made.current_lr_critic) == (1e-3, 1e-3)
    assert [group["lr"] for group in made.optimizer.adamw.param_groups] == [1e-3, 1e-3]
