"""The adapted model: initial state, the frozen prefix, padding, recomputation and value heads."""

import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model

from llmppo.config import LoraSection
from llmppo.errors import ConfigError
from llmppo.models.adapted import AdaptedModel, lora_config
from llmppo.testing.batches import tiny_agent, unlike_adapters
from llmppo.testing.models import tiny_model

IDS = torch.randint(1, 48, (3, 9), generator=torch.Generator().manual_seed(3))
ACTOR = (("actor", -1),)


def base(**changes):
    return tiny_model(0, 2, 16, **({"heads": 2, "kv_heads": 1, "vocab_size": 48} | changes))


def test_initial_state():
    """Actor = reference = base, values 0, everything trainable in fp32, the base frozen."""
    plain = base().bfloat16()
    model = AdaptedModel(plain, lora_config(LoraSection(r=2, lora_alpha=4), plain))
    hidden = model.hidden(IDS, ACTOR)
    assert torch.equal(hidden, model.hidden(IDS, ((None, -1),)))
    assert torch.equal(hidden, model.hidden(IDS, (("reference", -1),)))
    assert not model.values(hidden).any()
    assert model.values(hidden).dtype == torch.float32
    for role in ("actor", "critic"):
        assert all(p.requires_grad and p.dtype == torch.float32 for p in model.parameters(role))
    trainable = {id(p) for role in ("actor", "critic") for p in model.parameters(role)}
    assert not any(p.requires_grad for p in model.peft.parameters() if id(p) not in trainable)
    actor, reference = model.adapter_state("actor"), model.adapter_state("reference")
    assert all(torch.equal(actor[name], reference[name]) for name in actor)


def test_initialisation_follows_the_seed_and_leaves_the_process_alone():
    state = torch.random.get_rng_state()
    first, again, other = (tiny_agent(trained=False, seed=seed).model for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), state)
    name = next(iter(first.adapter_state("actor")))
    assert torch.equal(first.adapter_state("actor")[name], again.adapter_state("actor")[name])
    assert not torch.equal(first.adapter_state("actor")[name], other.adapter_state("actor")[name])
    assert not torch.equal(first.adapter_state("actor")[name], first.adapter_state("critic")[name])


def test_dropout_warns_and_runs_as_zero():
    config = LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.5, task_type="CAUSAL_LM")
    with pytest.warns(UserWarning, match="lora_dropout=0.5 is run as 0"):
        agent = tiny_agent(lora=config)
    assert config.lora_dropout == 0.5  # the caller's object stays as it was
    agent.actor.train()
    torch.testing.assert_close(agent.model.hidden(IDS, ACTOR), agent.model.hidden(IDS, ACTOR), rtol=0, atol=0)


@pytest.mark.parametrize("family", ["qwen2", "llama", "gemma2", "cohere"])
def test_frozen_prefix_equals_the_full_pass(family):
    agent = tiny_agent(family=family, layers=3, lora=LoraSection(r=4, lora_alpha=8, top_layers=1))
    model = agent.model
    assert model.first_adapted == 2
    lower = model.lower(IDS)
    for route in (ACTOR, (("critic", 1), (None, 1), ("reference", 1))):
        torch.testing.assert_close(
            model.hidden(IDS, route, lower), model.hidden(IDS, route), rtol=1e-5, atol=1e-5
        )
    full = model.hidden(IDS, ACTOR)
    assert not torch.equal(full, model.hidden(IDS, ((None, -1),)))


def test_a_model_adapted_everywhere_has_no_frozen_prefix():
    assert tiny_agent().model.first_adapted == 0


def test_more_top_layers_than_layers_is_refused():
    with pytest.raises(ConfigError, match="top_layers: 5 exceeds the model's 2 layers"):
        tiny_agent(lora=LoraSection(top_layers=5))


def test_padding_and_its_id_change_nothing():
    """Right padding under causal attention: a row sees the same numbers alone, padded, and whatever the pad id."""
    model = tiny_agent().model
    alone = model.hidden(IDS[:1, :5], ACTOR)
    for pad in (0, 7, 47):
        padded = torch.cat([IDS[:1, :5], torch.full((1, 4), pad)], dim=1)
        both = torch.cat([padded, IDS[1:2]])
        torch.testing.assert_close(model.hidden(both, ACTOR)[:1, :5], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_recomputation_gives_the_same_gradients(family):
    found = []
    for on in (False, True):
        model = tiny_agent(family=family, gradient_checkpointing=on).model
        mlp = []
        model.decoder.layers[0].mlp.register_forward_pre_hook(lambda *_, mlp=mlp: mlp.append(1))
        with model.router.using(ACTOR):
            model.hidden(IDS, ACTOR).square().sum().backward()
        assert len(mlp) == (2 if on else 1)  # once more in the backward pass
        found.append([parameter.grad for parameter in model.parameters("actor")])
        assert not any(module.training for module in model.peft.modules())
    for plain, recomputed in zip(*found, strict=True):
        torch.testing.assert_close(plain, recomputed, rtol=1e-6, atol=1e-7)


def test_recomputation_does_not_touch_sampling():
    prompts = [{"input_ids": torch.tensor([[1, 2, 3, 4]])}, {"input_ids": torch.tensor([[5, 6]])}]
    replies = []
    for on in (False, True):
        agent = tiny_agent(gradient_checkpointing=on, max_output_tokens=8, max_model_len=32)
        replies.append([row.tolist() for row in agent.get_action(prompts).token_ids])
    assert replies[0] == replies[1]


def test_recomputation_can_be_switched():
    agent = tiny_agent()
    for on in (True, False, True):
        agent.gradient_checkpointing = on
        mlp = []
        handle = agent.model.decoder.layers[0].mlp.register_forward_pre_hook(
            lambda *_, mlp=mlp: mlp.append(1)
        )
        with agent.model.router.using(ACTOR):
            agent.model.hidden(IDS, ACTOR).sum().backward()
        handle.remove()
        assert len(mlp) == (2 if on else 1)


def test_a_head_critic_sends_no_gradient_into_the_trunk():
    for critic, reached in (("head", False), ("adapter", True)):
        model = tiny_agent(critic=critic).model
        route = ((model.critic_route, -1),)
        with model.router.using(route):
            model.values(model.hidden(IDS, route)).square().sum().backward()
        trunk = [p.grad for adapter in model.adapters for p in model.router.parameters(adapter)]
        assert any(grad is not None and grad.any() for grad in trunk) is reached
        assert model.value_head.weight.grad.any()


def test_a_model_that_carries_adapters_is_refused():
    wrapped = get_peft_model(base(), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match="already carries PEFT adapters"):
        AdaptedModel(wrapped, LoraConfig(target_modules=["q_proj"]))


def test_an_unknown_transform_of_the_logits_is_refused():
    plain = base()
    forward = plain.forward

    def scaled(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits * 3
        return output

    plain.forward = scaled
    with pytest.raises(ConfigError, match="does something to its logits"):
        AdaptedModel(plain, LoraConfig(target_modules=["q_proj"]))


def test_adapter_state_must_fit():
    model, other = tiny_agent().model, tiny_agent(lora=LoraSection(r=4, target_modules=["q_proj"])).model
    with pytest.raises(ConfigError, match="don't fit the LoRA config"):
        model.load_adapter_state("actor", other.adapter_state("actor"))


def test_adapters_change_the_logits_after_training():
    """The helper that other tests rely on does make adapters differ."""
    agent = tiny_agent(trained=False)
    before = agent.model.hidden(IDS, ACTOR)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unlike_adapters(agent)
    assert (agent.model.hidden(IDS, ACTOR) - before).abs().max() > 1e-2
