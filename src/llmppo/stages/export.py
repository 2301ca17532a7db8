"""The `export` stage: a trained policy as a PEFT adapter, a merged model and a model card.

`out/adapter` loads with plain `PeftModel.from_pretrained`, `out/merged` with plain
`AutoModelForCausalLM.from_pretrained`. Merging happens once, in fp32; base and policy are only read.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from llmppo.errors import ArtefactError
from llmppo.files import (
    MANIFEST,
    atomic_folder,
    check_manifest,
    read_json,
    read_sealed_text,
    write_manifest,
    write_text,
)
from llmppo.models.quantized import quantization_of
from llmppo.policies import resolve_policy
from llmppo.provenance import provenance
from llmppo.reporting.card import model_card
from llmppo.reporting.results import load_chain

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".index.json")
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


def companions(base: Path) -> Iterator[Path]:
    """Files of a model folder besides weights and model config: tokenizer, template, generation config."""
    for path in sorted(base.iterdir()):
        if not path.is_file() or path.name.startswith((".", "README")):
            continue
        if path.name not in ("config.json", MANIFEST) and not path.name.endswith(WEIGHT_SUFFIXES):
            yield path


def base_location(base: Path, out: Path, config: Mapping[str, Any]) -> str:
    """Where the base model is found: its hub id or path as configured.

    A model that the workflow built is found from the export's own folder, on every machine the same.
    """
    section = config.get("base_model") or {}
    if section.get("kind") == "pretrained" and section.get("path"):
        return str(section["path"])
    return os.path.relpath(base, out)


def read_config(run_dir: Path) -> dict[str, Any]:
    """The resolved config of the chain; empty where the chain keeps none."""
    path = run_dir / "config.yaml"
    if not path.is_file():
        return {}
    content = yaml.safe_load(read_sealed_text(path))
    if not isinstance(content, dict):
        raise ArtefactError(f"{path} is not a mapping of config keys; delete it and run the same command")
    return content


def write_adapter(actor: Path, base: Path, folder: Path, name: str, revision: str | None) -> None:
    """Copy the actor's PEFT folder byte for byte, name its base model, add tokenizer and generation config."""
    for file in ADAPTER_FILES:
        if not (actor / file).is_file():
            raise ArtefactError(
                f"{actor / file} does not exist; delete {actor.parent} and run the same command"
            )
    folder.mkdir()
    for path in companions(base):
        shutil.copyfile(path, folder / path.name)
    shutil.copyfile(actor / ADAPTER_FILES[1], folder / ADAPTER_FILES[1])
    config = {
        **read_json(actor / ADAPTER_FILES[0]),
        "base_model_name_or_path": name,
        "revision": revision,
        "inference_mode": True,
    }
    write_text(folder / ADAPTER_FILES[0], json.dumps(config, indent=2, sort_keys=True) + "\n")


def _untie_if_adapted(model: Any, adapter: Path) -> None:
    """Give the output head weights of its own when the adapter changes only one of the tied two.

    Merging writes into the weight, which would otherwise change embedding and head alike.
    """
    import torch
    from safetensors import safe_open

    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return
    adapted = {id(head), id(embedding)}
    with safe_open(adapter / ADAPTER_FILES[1], framework="pt") as tensors:
        names = [key.removeprefix("base_model.model.") for key in tensors.keys()]  # noqa: SIM118
    touched = [
        module
        for name, module in model.named_modules()
        if id(module) in adapted and any(key.startswith(f"{name}.lora_") for key in names)
    ]
    if touched:
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        model.config.tie_word_embeddings = False


def write_merged(base: Path, adapter: Path, folder: Path, trust_remote_code: bool) -> None:
    """Merge the adapter into the base in fp32 and save it in the base's own data type.

    A quantised base is dequantised before: the adapter was trained on those weights, not on the original ones.
    """
    import torch
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForCausalLM

    stored = AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code).dtype or torch.float32
    quantization = quantization_of(read_json(base / MANIFEST))
    model = AutoModelForCausalLM.from_pretrained(
        base,
        dtype=torch.float32,
        trust_remote_code=trust_remote_code,
        use_safetensors=True,
        quantization_config=quantization,
    )
    if quantization is not None:
        model = model.dequantize(dtype=torch.float32)
    _untie_if_adapted(model, adapter)
    merged = PeftModel.from_pretrained(model, adapter).merge_and_unload(safe_merge=True)
    merged.to(stored).save_pretrained(folder)
    for path in companions(base):
        shutil.copyfile(path, folder / path.name)


def run(settings: Mapping[str, Any], *, base: Path, policy: Path, run_dir: Path, out: Path) -> str:
    """Export `policy` of the chain in `run_dir` to the folder `out`; its `manifest.json` is written last.

    `settings`: {export: {merged}, name, description, threads}. Raises ArtefactError for a damaged policy.
    """
    check_manifest(base)
    source = resolve_policy(policy)
    config = read_config(run_dir)
    section = config.get("base_model") or {}
    chain = load_chain(run_dir, run_dir.parent.name, int(run_dir.name.rpartition("-")[2]))
    name = base_location(base, out, config)
    merged = bool(settings["export"]["merged"])
    with atomic_folder(out) as folder:
        write_adapter(source / "actor", base, folder / "adapter", name, section.get("revision"))
        if merged:
            import torch

            torch.set_num_threads(int(settings.get("threads", 1)))
            write_merged(
                base, folder / "adapter", folder / "merged", bool(section.get("trust_remote_code", False))
            )
        card = model_card(
            name=str(settings["name"]),
            description=str(settings.get("description") or ""),
            base_name=name,
            built_here=section.get("kind") != "pretrained",
            iteration=int(source.name),
            chain=chain,
            config=config,
            merged=merged,
            versions=provenance(),
        )
        write_text(folder / "README.md", card)
        write_manifest(folder, kind="export", policy=source.name, base_model=name)
    return f"exported policy {source.name} to {out}"
