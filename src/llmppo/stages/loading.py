"""What several stages load: base model, tokenizer, and the policy of a chain."""

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmppo.config import LoraSection
from llmppo.errors import ArtefactError, ConfigError, LlmppoError, reading
from llmppo.files import MANIFEST, check_manifest, read_json
from llmppo.policies import STOPPED

if TYPE_CHECKING:
    from llmppo.models.adapted import AdaptedModel


def import_model_libraries() -> None:
    """Import transformers and peft, before anything else does, without scikit-learn.

    transformers imports it, with pandas and scipy, for a kind of assisted decoding that isn't used here:
    a sixth of what a stage costs to start. Environments and rewards may still import it afterwards.
    """
    absent = "sklearn" not in sys.modules
    if absent:
        sys.modules["sklearn"] = None  # type: ignore[assignment]
    try:
        import llmppo.models  # quiets what peft imports

        assert llmppo.models
        import peft
        from transformers import AutoModelForCausalLM, AutoTokenizer

        assert peft and AutoModelForCausalLM and AutoTokenizer  # lazy modules load their content on access
    finally:
        if absent:
            del sys.modules["sklearn"]


# Base models that a process holds, a worker for the stages it forks: folder to its files' stamps and the model.
_KEPT: dict[Path, tuple[frozenset[tuple[str, int, int]], Any]] = {}
_sharing = False
KEEP_MB = 4096  # of all kept models; one is kept whatever its size


def keep_base(base: Path) -> None:
    """Load a base model for the processes that will be forked from this one.

    A model that can't be loaded, or runs code of its own, is left to the stage. Beyond `KEEP_MB` those
    asked for longest ago are dropped.
    """
    folder = base.resolve()
    try:
        stamps = _stamps(folder)
        kept = _KEPT.pop(folder, None)
        if kept is not None and kept[0] == stamps:
            _KEPT[folder] = kept  # now the last in order
            return
        if not read_json(folder / MANIFEST).get("trust_remote_code", False):
            _KEPT[folder] = stamps, load_base(base)
    except (LlmppoError, OSError, ValueError, RuntimeError):
        return
    while len(_KEPT) > 1 and sum(_megabytes(model) for _, model in _KEPT.values()) > KEEP_MB:
        del _KEPT[next(iter(_KEPT))]


@contextmanager
def share_base_weights() -> Iterator[None]:
    """Within, a base model is read once: each `load_base` gives a model of its own over the same weights."""
    global _sharing
    _sharing = True
    try:
        yield
    finally:
        _sharing = False
        _KEPT.clear()


def _over_same_weights(model: Any) -> Any:
    """A copy of all modules with the very tensors, which are frozen; adapters then change only the copy."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def _stamps(folder: Path) -> frozenset[tuple[str, int, int]]:
    files = ((path, path.stat()) for path in folder.iterdir())
    return frozenset((path.name, status.st_mtime_ns, status.st_size) for path, status in files)


def _megabytes(model: Any) -> float:
    return sum(tensor.numel() * tensor.element_size() for tensor in model.parameters()) / 1e6


def check_base(base: Path, weights: bool) -> dict[str, Any]:
    """The manifest of a base model, its files compared with it; the weights only by who reads them: that takes long.

    Raises ArtefactError.
    """
    return check_manifest(base, skip=lambda name: not weights and name.endswith(".safetensors"))


def load_base(base: Path, device: str = "cpu") -> Any:
    """The frozen base model of a `base_model` folder, in the data type it was written in or quantised.

    In a forked stage it is the worker's, once: the caller may change it.
    """
    folder = base.resolve()
    kept = _KEPT.pop(folder, None)
    if kept is not None and kept[1].device.type == device and kept[0] == _stamps(folder):
        model = kept[1]
    else:
        model = _read_base(base, device)
    if not _sharing or getattr(model, "is_quantized", False):  # quantised layers repack their weights in use
        return model
    _KEPT[folder] = _stamps(folder), model
    return _over_same_weights(model)


def _read_base(base: Path, device: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    from llmppo.models.quantized import quantization_of

    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda, but this machine's PyTorch sees no GPU; set `device: cpu`")
    manifest = check_base(base, weights=True)
    trust = bool(manifest.get("trust_remote_code", False))
    placement: dict[str, Any] = {"device_map": {"": device}} if manifest.get("quantization") else {}
    with reading(base):
        model = AutoModelForCausalLM.from_pretrained(
            base,
            dtype="auto",
            local_files_only=True,
            trust_remote_code=trust,
            use_safetensors=True,
            quantization_config=quantization_of(manifest),
            **placement,
        )
    return (model if placement else model.to(device)).eval()


def load_tokenizer(base: Path) -> Any:
    from transformers import AutoTokenizer

    trust = bool(check_base(base, weights=False).get("trust_remote_code", False))
    with reading(base):
        return AutoTokenizer.from_pretrained(base, local_files_only=True, trust_remote_code=trust)


def is_stopped(policy: Path) -> bool:
    """Whether the chain ended before this policy, which then points to the last real one."""
    return read_json(policy / MANIFEST).get("kind") == STOPPED


def saved_lora(adapter: Path) -> Any:
    """The LoraConfig of a PEFT directory."""
    from peft import LoraConfig

    file = adapter / "adapter_config.json"
    with reading(file):
        fields = read_json(file)
        return LoraConfig(
            **{name: value for name, value in fields.items() if name in LoraConfig.__dataclass_fields__}
        )


def load_actor(base: Path, policy: Path | None, device: str) -> "AdaptedModel":
    """The policy for sampling only: base and actor adapter. Without a policy the adapter is zero."""
    from llmppo.models.adapted import ACTOR, AdaptedModel, lora_config
    from llmppo.trainer.checkpoint import Checkpoint

    model = load_base(base, device)
    if policy is None:
        return AdaptedModel(
            model, lora_config(LoraSection(r=1, lora_alpha=1), model), critic="head", separate_reference=False
        )
    checkpoint = Checkpoint.open(policy)
    lora = saved_lora(checkpoint.folder / ACTOR)
    with reading(checkpoint.folder / ACTOR):
        adapted = AdaptedModel(model, lora, critic="head", separate_reference=False)
        adapted.load_adapter_state(ACTOR, checkpoint.adapter(ACTOR))
    return adapted


def require_split(
    episodes: list[Any], split: str, seed: int, iteration: int | None, paths: list[Path]
) -> None:
    """Refuse rollouts of another chain or iteration, which would train on the wrong policy's episodes."""
    for episode in episodes:
        spec = episode.spec
        if (
            spec.split != split
            or spec.seed != seed
            or (iteration is not None and spec.iteration != iteration)
        ):
            raise ArtefactError(
                f"{paths[0].parent}: {spec.episode_id} belongs to {spec.split} of seed {spec.seed}, iteration {spec.iteration}; "
                f"this stage is {split} of seed {seed}"
                + ("" if iteration is None else f", iteration {iteration}")
            )
