"""The base_model stage: what it writes loads with plain transformers, and is the same every time."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmppo.errors import ConfigError
from llmppo.files import check_manifest
from llmppo.stages.base_model import run

TINY = {
    "kind": "tiny",
    "hidden_size": 16,
    "layers": 2,
    "heads": 2,
    "kv_heads": 1,
    "intermediate_size": 32,
    "max_positions": 128,
}


def tiny(out, seed=0, **options):
    run({"base_model": {**TINY, "warm_start": {"steps": 5}, **options}, "threads": 1}, seed=seed, out=out)
    return out


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("base") / "model")


def pretrained(path, out, **options):
    settings = {"base_model": {"kind": "pretrained", "path": str(path), **options}, "threads": 1}
    return run(settings, seed=0, out=out)


def test_a_tiny_model_loads_with_plain_transformers(base):
    model = AutoModelForCausalLM.from_pretrained(base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    manifest = check_manifest(base)
    assert manifest["kind"] == "tiny"
    assert (manifest["seed"], manifest["steps"]) == (0, 5)
    assert manifest["parameters"] == sum(p.numel() for p in model.parameters())
    assert manifest["loss"] > 0
    assert len(tokenizer) == manifest["vocabulary"] == model.config.vocab_size
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.model_max_length == 128
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    torch.manual_seed(0)
    reply = model.generate(**prompt, do_sample=True, max_new_tokens=60, num_return_sequences=16)
    width = prompt["input_ids"].shape[1]
    ended = [row[width:].tolist() for row in reply if tokenizer.eos_token_id in row[width:]]
    assert ended, "no sampled reply ended"
    for ids in ended:
        assert set(ids[ids.index(tokenizer.eos_token_id) + 1 :]) <= {tokenizer.pad_token_id}


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_weights(base, tmp_path):
    same, other = contents(tiny(tmp_path / "same")), contents(tiny(tmp_path / "other", seed=1))
    assert same == contents(base)
    assert {name for name in same if same[name] != other[name]} == {"model.safetensors", "manifest.json"}


def test_no_file_says_where_it_was_made(base, tmp_path):
    pretrained(base, tmp_path / "copy")
    for folder in (base, tmp_path / "copy"):
        for name, data in contents(folder).items():
            if name != "manifest.json":  # which names the source that the config gave
                assert str(tmp_path.parent).encode() not in data, name


def test_without_a_warm_start_the_weights_are_random(tmp_path):
    manifest = check_manifest(tiny(tmp_path / "m", warm_start=None))
    assert (manifest["steps"], manifest["loss"]) == (0, None)
    assert manifest["vocabulary"] == 256 + 5


def test_a_local_directory_is_copied_in_the_asked_type(base, tmp_path):
    pretrained(base, tmp_path / "copy", dtype="bfloat16")
    assert check_manifest(tmp_path / "copy")["dtype"] == "bfloat16"
    assert not any(path.is_symlink() for path in (tmp_path / "copy").iterdir())
    copy = AutoModelForCausalLM.from_pretrained(tmp_path / "copy", dtype="auto")
    original = AutoModelForCausalLM.from_pretrained(base)
    for ours, theirs in zip(copy.parameters(), original.parameters(), strict=True):
        assert torch.equal(ours, theirs.to(torch.bfloat16))
    tokenizers = [AutoTokenizer.from_pretrained(path) for path in (base, tmp_path / "copy")]
    text = "[7] Higher. ünï"
    assert tokenizers[0].encode(text) == tokenizers[1].encode(text)
    assert tokenizers[0].chat_template == tokenizers[1].chat_template


def test_a_tokenizer_without_pad_token_pads_with_its_end_token(base, tmp_path):
    source = tmp_path / "source"
    pretrained(base, source)
    config = json.loads((source / "tokenizer_config.json").read_text())
    config["pad_token"] = None
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    pretrained(source, tmp_path / "copy")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "copy")
    assert tokenizer.pad_token == tokenizer.eos_token == "<|end|>"


def test_code_of_a_model_directory_runs_only_when_allowed(base, tmp_path):
    source = tmp_path / "source"
    pretrained(base, source)
    (source / "own_model.py").write_text(
        "from transformers import Qwen2Config, Qwen2ForCausalLM\n"
        "class OwnConfig(Qwen2Config):\n    model_type = 'own'\n"
        "class OwnModel(Qwen2ForCausalLM):\n    config_class = OwnConfig\n"
    )
    config = json.loads((source / "config.json").read_text())
    config |= {
        "model_type": "own",
        "architectures": ["OwnModel"],
        "auto_map": {"AutoConfig": "own_model.OwnConfig", "AutoModelForCausalLM": "own_model.OwnModel"},
    }
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="trust_remote_code"):
        pretrained(source, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    pretrained(source, tmp_path / "copy", trust_remote_code=True)
    assert check_manifest(tmp_path / "copy")["trust_remote_code"] is True
    copy = AutoModelForCausalLM.from_pretrained(
        tmp_path / "copy", trust_remote_code=True, local_files_only=True
    )
    assert type(copy).__name__ == "OwnModel"


def test_paths_that_are_no_model_are_named(base, tmp_path):
    with pytest.raises(ConfigError, match="there is no directory"):
        pretrained(tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        pretrained(tmp_path / "empty", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_default_warm_start_teaches_the_format_and_weak_play(tmp_path):
    from llmppo.config import EnvConfig, SamplingConfig
    from llmppo.engines.actor import actor_engine
    from llmppo.envs.loading import harness_factory
    from llmppo.stages.loading import load_actor
    from llmppo.trajectories.collect import collect_episodes, rollout_metrics
    from llmppo.trajectories.episode import EpisodeSpec

    run(
        {"base_model": {"kind": "tiny", "warm_start": {"steps": 1000}}, "threads": 1},
        seed=0,
        out=tmp_path / "m",
    )
    sampling = SamplingConfig(max_output_tokens=8)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    engine = actor_engine(load_actor(tmp_path / "m", None, "cpu"), sampling, tokenizer)
    specs = [EpisodeSpec(seed=0, split="eval", iteration=0, index=index) for index in range(512)]
    episodes = collect_episodes(
        harness_factory(EnvConfig(), sampling, tokenizer), engine, specs, evaluation=True
    )
    metrics = rollout_metrics(episodes)
    assert 0.2 < metrics["rollout/success_rate"] < 0.4
    assert 0.02 < metrics["rollout/invalid_action_frac"] < 0.1
