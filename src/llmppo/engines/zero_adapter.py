"""An adapter of zeros: the base model's own replies from an engine whose requests all go through an adapter."""

from pathlib import Path

from llmppo.engines.vllm import Adapter
from llmppo.files import MANIFEST, atomic_folder, sha256_file, write_json, write_manifest


def zero_adapter(base: Path) -> Adapter:
    """The zero adapter of a base model folder, beside it, written where it isn't there yet."""
    key = sha256_file(base / MANIFEST)[:32]
    folder = base.resolve().parent / f".zero-adapter-{key}"
    if not (folder / MANIFEST).is_file():
        _write(base, folder)
    return Adapter(f"base-{key}", folder)


def _write(base: Path, folder: Path) -> None:
    import torch
    from peft import get_peft_model, get_peft_model_state_dict
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    from llmppo.config import LoraSection
    from llmppo.models.adapted import lora_config
    from llmppo.trainer.checkpoint import lora_fields

    config = AutoConfig.from_pretrained(base, local_files_only=True)
    with torch.device("meta"):  # names and shapes only
        model = AutoModelForCausalLM.from_config(config)
        adapted = get_peft_model(model, lora_config(LoraSection(r=1, lora_alpha=1), model))
    state = {name: torch.zeros(weight.shape) for name, weight in get_peft_model_state_dict(adapted).items()}
    fields = lora_fields(adapted.peft_config["default"])
    with atomic_folder(folder) as target:
        save_file(state, target / "adapter_model.safetensors", metadata={"format": "pt"})
        write_json(target / "adapter_config.json", fields)
        write_manifest(target, kind="zero_adapter")
