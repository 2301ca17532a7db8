"""Base model: a folder in Hugging Face format that plain `from_pretrained` loads, and a manifest.

It is built and warm-started (`tiny`), converted (`gguf`), or copied in the asked data type (`pretrained`),
so that results stay whole when they move. The same settings and seed give the same bytes. Weights are kept
in full; the manifest's `quantization` says how stages hold them.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from llmppo.config import BaseModelConfig, GgufModelConfig, PretrainedModelConfig, TinyModelConfig
from llmppo.errors import ConfigError
from llmppo.files import atomic_folder, digest, read_json, write_json, write_manifest

PROBE = "<|user|> 12345 + 678 don't  ünïcode\n\n  indented\t[[3]] 日本 🙂"
MERGE_DIALOGUES = 512  # enough to meet every word of a small task


def run(settings: Mapping[str, Any], *, seed: int, out: Path) -> str:
    """Write the model folder `out`."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    torch.set_num_threads(settings.get("threads", 1))
    disable_progress_bar()  # of loading and saving, which would fill the log
    config: Any = TypeAdapter(BaseModelConfig).validate_python(settings["base_model"])
    with atomic_folder(out) as folder:
        facts = _write(config, seed, folder)
        write_manifest(folder, kind=config.kind, seed=seed, config=digest(settings["base_model"]), **facts)
    loss = f", warm-start loss {facts['loss']:.3f}" if facts.get("loss") is not None else ""
    return f"base model ({config.kind}, seed {seed}): {facts['parameters']:,} parameters{loss}"


def _write(
    config: TinyModelConfig | GgufModelConfig | PretrainedModelConfig, seed: int, folder: Path
) -> dict[str, Any]:
    """Write model and tokenizer to `folder`; returns the facts of its manifest."""
    match config:
        case TinyModelConfig():
            model, tokenizer, facts = _tiny(config, seed)
        case GgufModelConfig():
            from llmppo.models.gguf import load_gguf, locate_gguf

            source = locate_gguf(config.package, config.file)
            _say(f"converting {source.name}")
            model, tokenizer = load_gguf(source)
            facts = {"source": f"{config.package or source.parent.name}/{source.name}"}
        case PretrainedModelConfig():
            from llmppo.models.pretrained import load_pretrained

            _say(f"loading {config.path}")
            model, tokenizer = load_pretrained(config)
            facts = {
                "source": config.path,
                "revision": getattr(model.config, "_commit_hash", None) or config.revision,
                "trust_remote_code": config.trust_remote_code,
            }
    _save(model, tokenizer, folder, trust_remote_code=bool(facts.get("trust_remote_code")))
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "vocabulary": len(tokenizer),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": config.quantization and config.quantization.model_dump(),
        "chat_template": bool(tokenizer.chat_template),
        **facts,
    }


def _tiny(config: TinyModelConfig, seed: int) -> tuple[Any, Any, dict[str, Any]]:
    from itertools import islice

    from llmppo.models.tiny import build_model, build_tokenizer, learn_merges
    from llmppo.models.warm_start import dialogues, warm_start
    from llmppo.seeding import derive_seed

    start = config.warm_start
    # The tokenizer doesn't depend on the seed, so that token ids mean the same in every chain.
    sample = islice(dialogues(start, "tokenizer"), MERGE_DIALOGUES) if start else ()
    texts = (text for dialogue in sample for exchange in dialogue for text in exchange)
    merges = learn_merges(texts, config.merges)
    tokenizer = build_tokenizer(merges, config.max_positions)
    model = build_model(config, tokenizer, derive_seed("weights", seed))
    if start is None:
        return model, tokenizer, {"steps": 0, "loss": None}
    loss = warm_start(model, tokenizer, start, seed, _say)
    return model, tokenizer, {"steps": start.steps, "loss": loss}


def _save(model: Any, tokenizer: Any, folder: Path, trust_remote_code: bool) -> None:
    """Write safetensors, configs and tokenizer without traces of where they were loaded from."""
    generation = model.generation_config
    if generation.eos_token_id is None:
        generation.eos_token_id = tokenizer.eos_token_id
    generation.pad_token_id = tokenizer.pad_token_id
    model.config._name_or_path = ""
    vars(model.config).pop("_model_name_or_path", None)
    model.save_pretrained(folder)
    tokenizer.name_or_path = ""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    values = read_json(path)
    for key in ("name_or_path", "is_local", "local_files_only"):
        values.pop(key, None)
    if values.get("tokenizer_class") == "TokenizersBackend":
        # The name of the same class that other libraries and older transformers know, too.
        values["tokenizer_class"] = "PreTrainedTokenizerFast"
    write_json(path, values)
    _check_reload(tokenizer, folder, trust_remote_code)
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors files come readable by their owner only


def _check_reload(tokenizer: Any, folder: Path, trust_remote_code: bool) -> None:
    """Raise ConfigError if the saved tokenizer comes back as another: transformers picks its class by model type."""
    from transformers import AutoTokenizer

    again = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    ends = [(t.eos_token_id, t.pad_token_id, len(t), t.encode(PROBE)) for t in (tokenizer, again)]
    if ends[0] != ends[1]:
        raise ConfigError(
            f"base_model: transformers reads the saved tokenizer back as a {type(again).__name__} that encodes otherwise "
            f"than the {type(tokenizer).__name__} it was; save the model with the tokenizer class of its architecture"
        )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
