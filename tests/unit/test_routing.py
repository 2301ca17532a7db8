"""Rows through adapters: every row as if it had been alone with its adapter."""

import pytest
import torch
from peft import LoraConfig, PeftModel

from llmppo.errors import ConfigError
from llmppo.models.adapted import AdaptedModel
from llmppo.testing.batches import tiny_agent, unlike_adapters
from llmppo.testing.models import tiny_model

IDS = torch.randint(0, 48, (6, 7), generator=torch.Generator().manual_seed(2))
MIXED = (("actor", 2), (None, 1), ("critic", 2), ("reference", 1))


@pytest.fixture
def model():
    return tiny_agent().model


def test_mixed_rows_equal_rows_of_their_own(model):
    together = model.hidden(IDS, MIXED)
    start, seen = 0, []
    for adapter, rows in MIXED:
        alone = model.hidden(IDS[start : start + rows], ((adapter, -1),))
        torch.testing.assert_close(together[start : start + rows], alone, rtol=1e-5, atol=1e-5)
        seen.append(model.hidden(IDS[:1], ((adapter, -1),)))
        start += rows
    for number, one in enumerate(seen):  # and the adapters do differ
        assert all((one - other).abs().max() > 1e-3 for other in seen[number + 1 :])


def test_no_adapter_is_the_base_model_bit_by_bit(model):
    plain = tiny_model(0, 2, 16, heads=2, kv_heads=1, vocab_size=48)
    expected = plain.get_decoder()(input_ids=IDS).last_hidden_state
    assert torch.equal(model.hidden(IDS, ((None, -1),)), expected)


def test_an_adapter_is_what_peft_computes(tmp_path):
    agent = tiny_agent(lora=LoraConfig(r=3, lora_alpha=5, target_modules="all-linear", use_rslora=True))
    agent.save_checkpoint(tmp_path / "policy")
    base = tiny_model(0, 2, 16, heads=2, kv_heads=1, vocab_size=48)
    loaded = PeftModel.from_pretrained(base, tmp_path / "policy" / "critic").eval()
    theirs = loaded.get_base_model().get_decoder()(input_ids=IDS).last_hidden_state
    torch.testing.assert_close(agent.model.hidden(IDS, (("critic", -1),)), theirs, rtol=1e-5, atol=1e-5)


def test_gradients_reach_only_the_adapters_of_the_route(model):
    with model.router.using(MIXED):
        hidden = model.hidden(IDS, MIXED)
        hidden[:2].square().sum().backward()  # the actor's rows
    assert all(parameter.grad is not None for parameter in model.router.parameters("actor"))
    assert not any(p.grad.any() for p in model.router.parameters("critic") if p.grad is not None)
    assert all(parameter.grad is None for parameter in model.router.parameters("reference"))
    assert not any("lora" not in name and p.grad is not None for name, p in model.peft.named_parameters())


@pytest.mark.parametrize(
    ("rows", "route"),
    [
        (6, MIXED),
        (6, (("critic", -1),)),
        (1, (("actor", 4), ("critic", 3))),  # packed
        (1, (("actor", 1),)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapted_layer_has_the_gradients_of_its_formula(rows, route, dtype):
    agent = tiny_agent()
    unlike_adapters(agent, scale=1.0)
    model = agent.model
    layer = next(iter(model.router.layers.values()))
    layer.base_layer.to(dtype)
    noise = torch.Generator().manual_seed(5)
    x = torch.randn(rows, 7, 16, generator=noise).to(dtype).requires_grad_()
    toward = torch.randn(rows, 7, layer.base_layer.out_features, generator=noise)
    weights = [layer.lora_A["actor"].weight, layer.lora_B["actor"].weight]
    weights += [layer.lora_A["critic"].weight, layer.lora_B["critic"].weight]
    with model.router.using(route):
        found = layer(x)

    pieces, tokens = [], x.reshape(-1, 16).split(_tokens(route, rows))
    for (name, _), piece in zip(route, tokens, strict=True):
        pieces.append(layer.base_layer(piece))
        if name is not None:
            low = piece.float() @ layer.lora_A[name].weight.T @ layer.lora_B[name].weight.T
            pieces[-1] = pieces[-1] + (layer.scaling[name] * low).to(dtype)
    expected = torch.cat(pieces).view_as(found)

    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    ours = torch.autograd.grad((found * toward).sum(), [x, *weights], allow_unused=True)
    theirs = torch.autograd.grad((expected * toward).sum(), [x, *weights], allow_unused=True)
    for own, other in zip(ours, theirs, strict=True):
        assert (own is None) == (other is None)
        if own is not None:
            assert (own - other).norm() <= tolerance * other.norm()


def _tokens(route, rows):
    if len(route) == 1:
        return [rows * 7]
    return [count * (1 if rows == 1 else 7) for _, count in route]


def test_the_route_comes_back_after_an_error(model):
    before = model.router.route

    def fail():
        with model.router.using((("actor", -1),)):
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        fail()
    assert model.router.route == before


def test_copy_takes_every_layer(model):
    model.router.copy("actor", "critic")
    for ours, theirs in zip(model.router.parameters("actor"), model.router.parameters("critic"), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.data_ptr() != theirs.data_ptr()
    assert not torch.equal(model.router.parameters("actor")[1], model.router.parameters("reference")[1])


REFUSED = {
    "use_dora": {"use_dora": True},
    "lora_bias": {"lora_bias": True},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "trainable_token_indices": {"trainable_token_indices": [1]},
    "bias": {"bias": "all"},
    "init_lora_weights": {"init_lora_weights": "pissa"},
    "output head": {"target_modules": ["q_proj", "lm_head"]},
    "embed_tokens": {"target_modules": ["q_proj", "embed_tokens"]},
    "nonsense": {"target_modules": ["nonsense"]},
}


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("named", REFUSED)
def test_what_routed_passes_would_leave_out_is_refused(named):
    """A LoRA option that isn't computed here would train one model and export another."""
    config = LoraConfig(**({"task_type": "CAUSAL_LM", "target_modules": ["q_proj"]} | REFUSED[named]))
    base = tiny_model(0, 1, 16, heads=2, kv_heads=1, vocab_size=48)
    with pytest.raises(ConfigError, match=named):
        AdaptedModel(base, config)


def test_ranks_and_scales_may_differ_between_layers(tmp_path):
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "up_proj"],
        rank_pattern={"q_proj": 2},
        alpha_pattern={"up_proj": 3},
    )
    agent = tiny_agent(lora=config)
    unlike_adapters(agent, 5)
    agent.save_checkpoint(tmp_path / "policy")
    base = tiny_model(0, 2, 16, heads=2, kv_heads=1, vocab_size=48)
    loaded = PeftModel.from_pretrained(base, tmp_path / "policy" / "actor").eval()
    theirs = loaded.get_base_model().get_decoder()(input_ids=IDS).last_hidden_state
    torch.testing.assert_close(agent.model.hidden(IDS, (("actor", -1),)), theirs, rtol=1e-5, atol=1e-5)
