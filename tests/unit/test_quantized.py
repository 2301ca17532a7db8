"""A base in 4 or 8 bits: what is quantised, and that PPO on it trains, repeats and merges as on any other."""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from llmppo.config import LoraSection, QuantizationConfig
from llmppo.errors import ConfigError
from llmppo.models.adapted import ACTOR
from llmppo.models.quantized import bnb_config
from llmppo.testing.batches import VOCABULARY, made_up_batch, unlike_adapters, weights
from llmppo.testing.models import tiny_model
from llmppo.trainer.agent import LLMPPO

bitsandbytes = pytest.importorskip("bitsandbytes")

KINDS = [
    {"bits": 4},
    {"bits": 4, "quant_type": "fp4", "double_quant": True},
    {"bits": 8},
]
IDS = torch.arange(24).reshape(2, 12)
ROUTE = ((ACTOR, -1),)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model(hidden=64, heads=2, kv_heads=1, vocab_size=VOCABULARY).save_pretrained(path)
    return path


def quantized_agent(folder: Path, kind: dict[str, Any], **settings: Any) -> LLMPPO:
    agent = LLMPPO(
        model_name=str(folder),
        quantization_config=kind,
        lora_config=LoraSection(r=4, lora_alpha=8),
        max_turns=3,
        **settings,
    )
    unlike_adapters(agent)
    return agent


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_decoder_is_quantised_and_the_head_is_not(folder: Path, kind: dict[str, Any]) -> None:
    base = quantized_agent(folder, kind).model.base
    layer = base.model.layers[0].self_attn.q_proj.base_layer
    expected = bitsandbytes.nn.Linear4bit if kind["bits"] == 4 else bitsandbytes.nn.Linear8bitLt
    assert isinstance(layer, expected)
    assert type(base.lm_head) is torch.nn.Linear
    assert base.lm_head.weight.dtype == torch.float32
    full = tiny_model(hidden=64, heads=2, kv_heads=1, vocab_size=VOCABULARY)
    size = sum(p.numel() * p.element_size() for p in layer.parameters())
    whole = full.model.layers[0].self_attn.q_proj
    assert size < sum(p.numel() * p.element_size() for p in whole.parameters()) / 2


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_learning_after_sampling_moves_the_adapters_and_nothing_else(
    folder: Path, kind: dict[str, Any]
) -> None:
    """Sampling first: on CPUs with AVX512-BF16 a pass without gradient would end all training of 4-bit layers."""
    agent = quantized_agent(folder, kind, lr_actor=1e-2, beta=0.05, max_output_tokens=4)
    agent.get_action([{"input_ids": torch.arange(1, 6)[None]}])
    before = weights(agent)
    frozen = {
        name: copy.deepcopy(tensor)
        for name, tensor in agent.model.base.state_dict().items()
        if "lora_" not in name
    }
    metrics = agent.learn(made_up_batch())
    assert metrics["actor/ratio_max"] == pytest.approx(1, abs=1e-5)
    for role in ("actor", "critic"):
        assert metrics[f"{role}/grad_norm"] > 0.1  # type: ignore[operator]
    after = weights(agent)
    for name in before:
        assert torch.equal(before[name], after[name]) is name.startswith("reference."), name
    now = agent.model.base.state_dict()
    assert all(torch.equal(tensor, now[name]) for name, tensor in frozen.items())
    assert all(
        "lora_" in name for name, parameter in agent.model.base.named_parameters() if parameter.requires_grad
    )


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_states_do_not_depend_on_the_rows_beside_them(folder: Path, kind: dict[str, Any]) -> None:
    agent = quantized_agent(folder, kind)
    model = agent.model
    # A state far out: by default 8-bit layers would treat its column apart, in every row of the pass.
    with torch.no_grad():
        model.base.get_input_embeddings().weight[20] *= 100
        alone, together = model.hidden(IDS[:1], ROUTE), model.hidden(IDS, ROUTE)[:1]
    torch.testing.assert_close(alone, together, rtol=0, atol=1e-5)
    torch.testing.assert_close(model.hidden(IDS, ROUTE)[:1].detach(), together, rtol=0, atol=1e-5)


def test_a_model_that_sampled_before_it_was_adapted_trains_too(folder: Path) -> None:
    section = QuantizationConfig(bits=4)
    base = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=bnb_config(section, torch.float32)
    )
    with torch.no_grad():
        base(IDS)
    agent = LLMPPO(actor_network=base, lora_config=LoraSection(r=4), max_turns=3)
    unlike_adapters(agent)
    assert agent.learn(made_up_batch())["actor/grad_norm"] > 0.1  # type: ignore[operator]


def test_a_clone_goes_on_as_its_original(folder: Path) -> None:
    first = quantized_agent(folder, {"bits": 4}, lr_actor=1e-2)
    twin = first.clone()
    batch = made_up_batch()
    first.learn(batch)
    twin.learn(batch)
    ours, theirs = weights(first), weights(twin)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_eight_bit_products_do_not_fill_the_log(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        quantized_agent(folder, {"bits": 8}).learn(made_up_batch())
    assert not [record for record in caplog.records if record.name.startswith("bitsandbytes")]


def test_what_cannot_be_is_refused(folder: Path, tmp_path: Path) -> None:
    section = QuantizationConfig(bits=4)
    with pytest.raises(ConfigError, match="from_pretrained when you load actor_network"):
        LLMPPO(actor_network=tiny_model(), quantization_config=section)
    with pytest.raises(ConfigError, match="vllm_config: vLLM would sample"):
        quantized_agent(folder, {"bits": 4}, vllm_config={})
    with pytest.raises(ConfigError, match="lora_only=True"):
        quantized_agent(folder, {"bits": 8}).save_checkpoint(tmp_path / "state", lora_only=False)
    given = bnb_config(section, torch.float32)
    given.llm_int8_skip_modules = ["q_proj"]
    untied = tmp_path / "untied"
    tiny_model(hidden=64, heads=2, kv_heads=1, tied=False).save_pretrained(untied)
    with pytest.raises(ConfigError, match="llm_int8_skip_modules"):
        LLMPPO(model_name=str(untied), quantization_config=given)
