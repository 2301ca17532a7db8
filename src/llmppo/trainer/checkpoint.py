"""Policy folders: adapters as PEFT directories, safetensors and JSON, sealed by a manifest. No pickle.

`actor/`, `critic/`, `reference/` load with plain `PeftModel.from_pretrained`; `value_head.safetensors`,
`optimizer.safetensors` and `trainer.json` hold the rest. A `Snapshot` is a host copy of all of it that
can be written while training goes on.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, isfinite

from llmppo.errors import ArtefactError, ConfigError, reading
from llmppo.files import atomic_folder, read_json, write_json, write_manifest
from llmppo.policies import resolve_policy

OPTIMIZER_FILE = "optimizer.safetensors"
VALUE_HEAD_FILE = "value_head.safetensors"
TRAINER_FILE = "trainer.json"
BASE_FILE = "base.safetensors"

# Fields that describe where or by which version an adapter was made, not what it computes.
DESCRIPTIVE_LORA_FIELDS = {
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "peft_version",
    "task_type",
    "auto_mapping",
}


def lora_fields(config: Any) -> dict[str, Any]:
    """A PEFT LoraConfig as plain JSON, sets sorted so that equal configs give equal bytes."""
    fields = json.loads(
        json.dumps(
            config.to_dict(), default=lambda value: sorted(value) if isinstance(value, set) else str(value)
        )
    )
    if isinstance(fields.get("target_modules"), list):
        fields["target_modules"] = sorted(fields["target_modules"])
    return fields


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint in host memory; later training doesn't change it."""

    adapters: dict[str, dict[str, Tensor]]
    adapter_configs: dict[str, dict[str, Any]]
    value_head: dict[str, Tensor]
    optimizer: dict[str, Tensor] | None
    trainer: dict[str, Any]
    base: dict[str, Tensor] | None = None

    def write(self, path: str | Path, **facts: Any) -> None:
        """Write the folder atomically; `facts` go into the manifest."""
        with atomic_folder(path) as folder:
            for name, state in self.adapters.items():
                (folder / name).mkdir()
                save_file(state, folder / name / "adapter_model.safetensors", metadata={"format": "pt"})
                write_json(folder / name / "adapter_config.json", self.adapter_configs[name])
            save_file(self.value_head, folder / VALUE_HEAD_FILE)
            if self.optimizer is not None:
                save_file(self.optimizer, folder / OPTIMIZER_FILE)
            if self.base is not None:
                save_file(self.base, folder / BASE_FILE)
            write_json(folder / TRAINER_FILE, self.trainer)
            write_manifest(folder, kind="policy", **facts)


@dataclass(frozen=True)
class Checkpoint:
    """A verified policy folder."""

    folder: Path
    trainer: dict[str, Any]

    @classmethod
    def open(cls, path: str | Path) -> "Checkpoint":
        """Check every file against the manifest. A pruned optimizer state may be absent."""
        folder = resolve_policy(Path(path))
        trainer = read_json(folder / TRAINER_FILE)
        if not isinstance(trainer, dict):
            raise ArtefactError(
                f"{folder / TRAINER_FILE} is not a mapping; delete {folder} and run the same command"
            )
        return cls(folder, trainer)

    def has_adapter(self, name: str) -> bool:
        return (self.folder / name / "adapter_model.safetensors").is_file()

    def adapter(self, name: str) -> dict[str, Tensor]:
        return self._tensors(f"{name}/adapter_model.safetensors")

    def adapter_config(self, name: str) -> dict[str, Any]:
        return read_json(self.folder / name / "adapter_config.json")

    def value_head(self) -> dict[str, Tensor]:
        return self._tensors(VALUE_HEAD_FILE)

    def optimizer(self) -> dict[str, Tensor] | None:
        return self._tensors(OPTIMIZER_FILE) if (self.folder / OPTIMIZER_FILE).is_file() else None

    def base(self) -> dict[str, Tensor] | None:
        return self._tensors(BASE_FILE) if (self.folder / BASE_FILE).is_file() else None

    def _tensors(self, name: str) -> dict[str, Tensor]:
        way_out = f"delete {self.folder} and run the same command"
        with reading(self.folder / name, way_out=way_out):
            tensors = load_file(self.folder / name)
        for key, tensor in tensors.items():
            if not bool(isfinite(tensor).all()):
                raise ArtefactError(f"{self.folder / name}: {key} holds NaN or infinite numbers; {way_out}")
        return tensors


def require_same_lora(saved: dict[str, Any], live: dict[str, Any], where: Path) -> None:
    """Raise ConfigError listing each field in which two LoRA configs differ."""
    keys = sorted((set(saved) | set(live)) - DESCRIPTIVE_LORA_FIELDS)
    different = [
        f"  {key}: checkpoint {saved.get(key)!r}, here {live.get(key)!r}"
        for key in keys
        if saved.get(key) != live.get(key)
    ]
    if different:
        raise ConfigError(
            f"the LoRA config of {where} differs from this agent's; create the agent with the checkpoint's:\n"
            + "\n".join(different)
        )
