"""The export stage: base + adapter, exported adapter and merged model give the same logits."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from llmppo.errors import ArtefactError
from llmppo.files import check_manifest, write_json, write_manifest, write_sealed_text
from llmppo.models.adapted import ACTOR
from llmppo.models.tiny import build_tokenizer
from llmppo.stages import export
from llmppo.stages.loading import load_actor

SETTINGS = {"export": {"merged": True}, "name": "tiny-game", "description": "A game.", "threads": 1}
IDS = torch.arange(12).reshape(2, 6)


def make_run(root: Path, *, tied: bool, targets: str | list[str] = "all-linear") -> dict[str, Path]:
    """A base model, a policy with non-zero LoRA weights and a run folder with two evaluations."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer([])
    base = root / "shared" / "base_model" / "abc123"
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=24,
            tie_word_embeddings=tied,
        )
    )
    model.generation_config = GenerationConfig(eos_token_id=3, max_new_tokens=7)
    model.save_pretrained(base)
    tokenizer.save_pretrained(base)
    write_manifest(base, kind="base_model")

    loaded = AutoModelForCausalLM.from_pretrained(base)
    actor = get_peft_model(
        loaded, LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM")
    )
    for name, parameter in actor.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    run_dir = root / "game" / "main" / "seed-3"
    policy = run_dir / "policy" / "0008"
    actor.save_pretrained(policy / "actor")
    write_json(policy / "trainer.json", {})
    write_manifest(policy, kind="policy", iteration=8)

    run_dir.mkdir(parents=True, exist_ok=True)
    config = {
        "base_model": {"kind": "tiny"},
        "ppo": {"clip_coef": 0.17},
        "evaluation": {"decoding": ["greedy", "sampled"]},
    }
    write_sealed_text(run_dir / "config.yaml", yaml.safe_dump(config))
    for iteration, rate in ((0, 0.25), (8, 0.75)):
        metrics = {"eval/success_rate": rate, "eval/n": 64, "eval/sampled/success_rate": rate - 0.125}
        write_json(
            run_dir / "evaluations" / f"{iteration:04d}" / "metrics.json",
            {"iteration": iteration, "finished_at": 1e9, "metrics": metrics},
        )
    return {"base": base, "policy": policy, "run_dir": run_dir, "out": run_dir / "export"}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.mark.parametrize(
    ("tied", "targets"),
    [
        (True, "all-linear"),
        (False, "all-linear"),
        (True, ["q_proj", "lm_head"]),
        (False, ["v_proj", "lm_head"]),
        (True, ["embed_tokens", "o_proj"]),
    ],
)
def test_exported_and_merged_models_have_the_policy_s_logits(
    tmp_path: Path, tied: bool, targets: str | list[str]
) -> None:
    paths = make_run(tmp_path, tied=tied, targets=targets)
    base = AutoModelForCausalLM.from_pretrained(paths["base"])
    untouched = logits(base)
    expected = logits(PeftModel.from_pretrained(base, paths["policy"] / "actor"))
    assert (expected - untouched).abs().max() > 0.05  # the adapter does something

    export.run(SETTINGS, **paths)

    adapter = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(paths["base"]), paths["out"] / "adapter"
    )
    merged = AutoModelForCausalLM.from_pretrained(paths["out"] / "merged")
    torch.testing.assert_close(logits(adapter), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(logits(merged), expected, atol=1e-5, rtol=0)
    if targets == "all-linear":
        assert merged.config.tie_word_embeddings is tied
        assert (merged.lm_head.weight is merged.model.embed_tokens.weight) is tied


def quantise(paths: dict[str, Path], bits: int) -> None:
    section = {"bits": bits, "quant_type": "nf4", "double_quant": False}
    write_manifest(paths["base"], kind="base_model", dtype="float32", quantization=section)
    config = {"base_model": {"kind": "tiny", "quantization": section}}
    write_sealed_text(paths["run_dir"] / "config.yaml", yaml.safe_dump(config))


def test_a_four_bit_base_is_merged_as_training_saw_it(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    paths = make_run(tmp_path, tied=True)
    quantise(paths, 4)
    policy = load_actor(paths["base"], paths["policy"], "cpu")
    with torch.no_grad():
        expected = policy.head.logits(policy.hidden(IDS, ((ACTOR, -1),)))
    plain = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(paths["base"]), paths["policy"] / "actor"
    )
    export.run(SETTINGS, **paths)
    merged = AutoModelForCausalLM.from_pretrained(paths["out"] / "merged")
    torch.testing.assert_close(logits(merged), expected, atol=1e-5, rtol=0)
    assert (logits(plain) - expected).abs().max() > 1e-3
    card = (paths["out"] / "README.md").read_text()
    assert "held in 4 bits" in card
    assert "holds the dequantised weights" in card


def test_an_eight_bit_base_is_merged_into_its_rounded_weights(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    paths = make_run(tmp_path, tied=True)
    quantise(paths, 8)
    plain = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(paths["base"]), paths["policy"] / "actor"
    )
    layer = plain.base_model.model.model.layers[0].self_attn.q_proj
    original, delta = layer.base_layer.weight, layer.get_delta_weight("default")
    export.run(SETTINGS, **paths)
    merged = AutoModelForCausalLM.from_pretrained(paths["out"] / "merged")
    scale = original.abs().amax(dim=1, keepdim=True) / 127
    rounded = (original / scale).round() * scale
    off = (merged.model.layers[0].self_attn.q_proj.weight - delta - rounded).abs().mean()
    assert off < 0.2 * (original - rounded).abs().mean()


def test_exports_carry_tokenizer_generation_config_and_manifest(tmp_path: Path) -> None:
    paths = make_run(tmp_path, tied=True)
    export.run(SETTINGS, **paths)
    text = "Guess [7]"
    expected = AutoTokenizer.from_pretrained(paths["base"])
    for folder in ("adapter", "merged"):
        tokenizer = AutoTokenizer.from_pretrained(paths["out"] / folder)
        assert tokenizer.encode(text) == expected.encode(text)
        assert tokenizer.chat_template == expected.chat_template
        assert GenerationConfig.from_pretrained(paths["out"] / folder).eos_token_id == 3
    manifest = check_manifest(paths["out"])
    assert manifest["policy"] == "0008"
    assert {"README.md", "adapter/adapter_model.safetensors", "merged/model.safetensors"} <= set(
        manifest["files"]
    )


def test_the_adapter_is_copied_and_names_no_machine_path(tmp_path: Path) -> None:
    paths = make_run(tmp_path, tied=True)
    export.run({**SETTINGS, "export": {"merged": False}}, **paths)
    weights = "adapter_model.safetensors"
    assert (paths["out"] / "adapter" / weights).read_bytes() == (
        paths["policy"] / "actor" / weights
    ).read_bytes()
    config = json.loads((paths["out"] / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "../../../../shared/base_model/abc123"
    assert config["r"] == 4
    assert not (paths["out"] / "merged").exists()
    for path in paths["out"].rglob("*"):
        assert not path.is_file() or str(tmp_path).encode() not in path.read_bytes(), path


def test_a_hub_model_keeps_its_id_and_revision(tmp_path: Path) -> None:
    paths = make_run(tmp_path, tied=True)
    section = {"kind": "pretrained", "path": "org/model", "revision": "abcdef"}
    write_sealed_text(paths["run_dir"] / "config.yaml", yaml.safe_dump({"base_model": section}))
    export.run({**SETTINGS, "export": {"merged": False}}, **paths)
    config = json.loads((paths["out"] / "adapter" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/model", "abcdef")
    _, front, _ = (paths["out"] / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(front)["base_model"] == "org/model"


def test_the_card_s_snippets_run_in_the_export_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = make_run(tmp_path, tied=True)
    export.run(SETTINGS, **paths)
    blocks = re.findall(r"```python\n(.*?)```", (paths["out"] / "README.md").read_text(), flags=re.DOTALL)
    monkeypatch.chdir(paths["out"])
    found = []
    for block in blocks:
        names: dict[str, Any] = {}
        exec(block, names)
        assert names["tokenizer"].encode("Guess")
        found.append(logits(names["model"]))
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=0)


def test_the_card_has_front_matter_results_and_recipe(tmp_path: Path) -> None:
    paths = make_run(tmp_path, tied=True)
    export.run({**SETTINGS, "export": {"merged": False}}, **paths)
    card = (paths["out"] / "README.md").read_text()
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front)["library_name"] == "peft"
    # Wilson intervals of 16/64 and 48/64.
    assert "| greedy | 0.250 [0.160, 0.368], n = 64 | 0.750 [0.632, 0.840], n = 64 |" in body
    assert "| sampled | 0.125 " in body
    assert "clip_coef: 0.17" in body
    assert "policy 8" in body
    assert 'from_pretrained("merged")' not in body


def test_a_stopped_policy_exports_the_one_it_points_to(tmp_path: Path) -> None:
    paths = make_run(tmp_path, tied=True)
    pointer = paths["policy"].with_name("0012")
    write_json(pointer / "manifest.json", {"kind": "stopped", "target": "0008", "files": {}})
    export.run({**SETTINGS, "export": {"merged": False}}, **{**paths, "policy": pointer})
    assert check_manifest(paths["out"])["policy"] == "0008"
    assert "ended training after iteration 8" in (paths["out"] / "README.md").read_text()


def test_exporting_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    paths = make_run(tmp_path, tied=True)
    export.run(SETTINGS, **paths)
    first = check_manifest(paths["out"])
    export.run(SETTINGS, **paths)
    assert check_manifest(paths["out"]) == first


def test_an_edited_config_is_refused_by_name(tmp_path: Path) -> None:
    paths = make_run(tmp_path, tied=True)
    config = paths["run_dir"] / "config.yaml"
    config.write_text(config.read_text().replace("0.17", "0.18"))
    with pytest.raises(ArtefactError, match=r"seed-3/config.yaml differs from its checksum .* delete it and"):
        export.run(SETTINGS, **paths)
    assert not paths["out"].exists()


def test_a_damaged_policy_is_refused_by_name(tmp_path: Path) -> None:
    paths = make_run(tmp_path, tied=True)
    (paths["policy"] / "actor" / "adapter_config.json").write_text("{}")
    with pytest.raises(ArtefactError, match=r"0008/actor/adapter_config.json"):
        export.run(SETTINGS, **paths)
    assert not paths["out"].exists()
