"""Model families whose layers differ from most: flattened inputs, experts, other names, other rotations."""

import pytest
import torch
import transformers
from peft import LoraConfig

from llmppo import LLMPPO
from llmppo.config import LoraSection
from llmppo.errors import ConfigError

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24, "decoder_sparse_step": 1,
}  # fmt: skip
FAMILIES = {
    "OPT": ({"ffn_dim": 48, "word_embed_proj_dim": 32}, "all-linear"),  # its MLP sees flattened tokens
    "GPTNeoX": ({}, "all-linear"),
    "Phi3": ({}, "all-linear"),
    "Qwen2Moe": (EXPERTS, ["q_proj", "o_proj", "gate_proj"]),  # that of the shared expert
    "GptOss": ({**EXPERTS, "head_dim": 8}, ["q_proj", "k_proj"]),  # its MLP gives a pair
}


def network(family, **more):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(SHAPE | more))
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def batch(lengths=(16, 18, 17), prefix=12):
    noise = torch.Generator().manual_seed(1)
    ids = [
        torch.cat([torch.arange(prefix), torch.randint(0, 64, (n - prefix,), generator=noise)])
        for n in lengths
    ]
    return ids, [torch.arange(n - 1) >= prefix for n in lengths], torch.tensor([1.0, 0.0, 0.5])


def outcome(model, targets, change=lambda agent: None, **settings):
    """Gradients of the first step and old log-probs."""
    agent = LLMPPO(
        actor_network=model, lora_config=LoraConfig(r=4, target_modules=targets), max_turns=1, max_model_len=32,
        **{"batch_size": 3, "beta": 0.1, "lr_actor": 1e-30, "lr_critic": 1e-30, "update_epochs": 2} | settings,
    )  # fmt: skip
    noise = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in agent.model.peft.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=noise))
    change(agent)
    metrics = agent.learn(batch())
    found = agent.last_outcome.columns
    return metrics["actor/grad_norm"], metrics["critic/grad_norm"], found.old_logprobs, found.values


def one_by_one(agent):
    agent.model.prefixes = agent.model.reads_apart = False


@pytest.mark.parametrize("family", FAMILIES)
def test_passes_together_equal_rows_one_by_one(family):
    more, targets = FAMILIES[family]
    together = outcome(network(family, **more), targets, fuse_actor_critic_pass=True)
    apart = outcome(
        network(family, **more), targets, one_by_one, fuse_actor_critic_pass=False, micro_batch_size_per_gpu=1
    )
    for ours, expected in zip(together, apart, strict=True):
        torch.testing.assert_close(torch.as_tensor(ours), torch.as_tensor(expected), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rotation_that_depends_on_the_length_of_a_pass_is_warned_of_and_shares_no_prefix(kind):
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4} if kind == "longrope" else {"factor": 4.0}
    rope = {"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": 24, **factors}
    model = network("Llama", rope_parameters=rope)
    with pytest.warns(UserWarning, match="beyond 24 tokens"):
        agent = LLMPPO(actor_network=model, max_turns=1, max_model_len=32)
    assert not agent.model.shares_prefixes


@pytest.mark.parametrize("family", ["GPTNeoX", "Phi"])
def test_frozen_layers_run_for_every_role_where_they_cannot_run_alone(family):
    with pytest.warns(UserWarning, match="can't be run in two parts"):
        agent = LLMPPO(actor_network=network(family), lora_config=LoraSection(top_layers=1), max_turns=1)
    assert agent.model.first_adapted == 0


def test_a_model_may_have_an_mlp_width_for_each_layer():
    small = {
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 64,
        "laurel_rank": 4,
        "head_dim": 8,
    }
    layers = {
        "num_kv_shared_layers": 0,
        "layer_types": ["full_attention"] * 3,
        "activation_sparsity_pattern": [0.0] * 3,
    }
    config = transformers.Gemma3nTextConfig(**(SHAPE | small | layers | {"intermediate_size": [48, 64, 48]}))
    model = transformers.Gemma3nForCausalLM(config).eval()
    agent = LLMPPO(actor_network=model, lora_config=LoraConfig(r=4, target_modules=["q_proj"]), max_turns=1)
    assert agent.plan is not None


def test_a_copy_asks_only_where_states_are_read():
    agent = LLMPPO(actor_network=network("Llama"), max_turns=1, max_model_len=32)
    twin = agent.clone()
    attention = twin.model.layers.layers[-1].self_attn
    assert attention.rows_read.__self__ is twin.model.last_layer


def test_experts_are_refused_with_a_way_out():
    with pytest.raises(ConfigError, match=r"target_modules, for instance \[q_proj"):
        LLMPPO(actor_network=network("Qwen3Moe", **EXPERTS), max_turns=1)
