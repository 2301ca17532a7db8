"""`LLMPPO(vllm_config=...)` with the real vLLM: replies follow the agent's weights of the moment."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from llmppo import LLMPPO, RolloutHarness, train_llm_rollout
from llmppo.config import LoraSection, VLLMConfig
from llmppo.errors import ConfigError
from llmppo.models.adapted import ACTOR
from llmppo.testing import CountdownEnv, tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
PROMPTS = [{"input_ids": torch.tensor([[number, 40, 50]])} for number in (30, 60, 90, 120)]
NEEDS_VLLM = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="`make vllm` installs vLLM")


def make_agent(**settings):
    # Heads of 64: vLLM's attention on a CPU has no smaller ones.
    return LLMPPO(
        actor_network=tiny_model(seed=4, hidden=128, heads=2, kv_heads=1, max_positions=256),
        batch_size=4, max_output_tokens=6, max_model_len=64, lr_actor=3e-2, lr_critic=1e-3, beta=0.0, **settings,
    )  # fmt: skip


def exercise(mode):
    """Two iterations of training on vLLM's replies, and a change of the adapter by hand."""
    agent = make_agent(vllm_config={"mode": mode, "cpu_cache_gib": 1}, top_k=20)
    try:

        def env_factory():
            return RolloutHarness.local(CountdownEnv(2), TOKENIZER, max_turns=2, max_output_tokens=6)

        train_llm_rollout([agent], 2, env_factory, iterations=2, verbose=False)
        for threads in (3, 1):  # vLLM leaves the process's threads to the trainer
            torch.set_num_threads(threads)
            assert torch.get_num_threads() == threads
        for metrics in agent.history:
            assert metrics["rollout/logprob_gap_max"] < 1e-3
            assert metrics["rollout/engine_rows_skipped"] == 0
        acted = agent.get_action(PROMPTS)
        assert [ids.shape[1] for ids in acted.token_ids] == [mask.shape[1] + 1 for mask in acted.action_masks]
        assert all(
            support.shape[0] == len(logps)
            for support, logps in zip(acted.sampling_supports, acted.sampling_logps, strict=True)
        )
        before = [ids.tolist() for ids in agent.get_action(PROMPTS, training=False).token_ids]
        again = [ids.tolist() for ids in agent.get_action(PROMPTS, training=False).token_ids]
        state = agent.model.adapter_state(ACTOR)
        generator = torch.Generator().manual_seed(0)
        agent.model.load_adapter_state(
            ACTOR,
            {name: 0.3 * torch.randn(weight.shape, generator=generator) for name, weight in state.items()},
        )
        after = [ids.tolist() for ids in agent.get_action(PROMPTS, training=False).token_ids]
        assert before == again
        assert before != after
        agent.vllm_config, served = None, agent.engine
        agent._engine = None
        assert after == [ids.tolist() for ids in agent.get_action(PROMPTS, training=False).token_ids]
        assert served.decode_steps > 0
        folder = agent._vllm._folder
        assert folder.is_dir()
    finally:
        agent.clean_up()
    assert not folder.exists()


@NEEDS_VLLM
@pytest.mark.slow
def test_a_server_follows_the_agent():
    exercise("server")


@NEEDS_VLLM
@pytest.mark.slow
def test_vllm_in_the_same_process_follows_the_agent():
    """In a process of its own: vLLM can't be loaded twice, and other tests load it."""
    ran = subprocess.run(
        [sys.executable, "-c", "from test_colocated import exercise; exercise('in_process')"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]


def test_the_files_that_vllm_loads_are_the_plain_base_and_the_adapter(tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from llmppo.engines.colocated import ColocatedVLLM

    agent = make_agent()
    agent.model.load_adapter_state(
        ACTOR,
        {name: torch.full_like(weight, 0.01) for name, weight in agent.model.adapter_state(ACTOR).items()},
    )
    vllm = ColocatedVLLM(agent.model, VLLMConfig())
    base, adapter = vllm._base_folder(), vllm._current_adapter()
    ids = torch.arange(30, 50)[None]
    plain = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad(), agent.select_adapter(None):
        torch.testing.assert_close(plain(ids).logits, agent.actor(ids).logits)
    loaded = PeftModel.from_pretrained(plain, adapter.path)
    with torch.no_grad(), agent.select_adapter("actor"):
        torch.testing.assert_close(loaded(ids).logits, agent.actor(ids).logits, atol=1e-5, rtol=1e-5)
    assert vllm._current_adapter() is adapter
    agent.model.adapter_state(ACTOR)[next(iter(agent.model.adapter_state(ACTOR)))].data.add_(1.0)
    assert vllm._current_adapter().name != adapter.name
    vllm.close()
    assert not base.exists()


def test_bad_vllm_settings_are_named():
    with pytest.raises(ConfigError, match=r"vllm_config:\n  max_num_seqs"):
        make_agent(vllm_config={"max_num_seqs": 0})
    agent = make_agent(vllm_config={}, lora_config=LoraSection(r=600))
    with pytest.raises(ConfigError, match="rank 600"):
        agent.get_action(PROMPTS)
