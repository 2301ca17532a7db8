"""Model folders, checkpoints and chat templates from strangers: nothing in them runs, and the error names them."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from llmppo.envs import templates
from llmppo.envs.templates import make_framer
from llmppo.errors import ArtefactError, ConfigError, LlmppoError, TemplateError
from llmppo.files import read_json, write_manifest
from llmppo.stages import base_model, export
from llmppo.stages.loading import load_actor, load_base, load_tokenizer
from llmppo.testing.batches import tiny_agent
from llmppo.trainer.checkpoint import Checkpoint


class Trap:
    """Whoever unpickles it makes the file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def pickled(mark: Path, file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """A checkpoint as torch.save writes it, with a trap among the weights."""
    torch.save({**tensors, "trap": Trap(mark)}, file)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "model"
    tiny = {
        "kind": "tiny",
        "hidden_size": 16,
        "layers": 1,
        "heads": 2,
        "kv_heads": 1,
        "intermediate_size": 32,
    }
    base_model.run({"base_model": {**tiny, "max_positions": 64, "warm_start": None}}, seed=0, out=folder)
    return folder


@pytest.fixture
def model(base: Path, tmp_path: Path) -> Path:
    return shutil.copytree(base, tmp_path / "model")


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "it-ran"


def sealed(folder: Path) -> Path:
    """With a manifest that agrees with the files, as an attacker would make it."""
    facts = {name: fact for name, fact in read_json(folder / "manifest.json").items() if name != "files"}
    write_manifest(folder, **facts)
    return folder


def copied(path: Path, out: Path, **options: Any) -> str:
    return base_model.run(
        {"base_model": {"kind": "pretrained", "path": str(path), **options}}, seed=0, out=out
    )


def edited(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_the_trap_works(tmp_path: Path, mark: Path) -> None:
    pickled(mark, tmp_path / "weights.bin", {})
    torch.load(tmp_path / "weights.bin", weights_only=False)
    assert mark.exists()
    mark.unlink()
    pickle.loads(pickle.dumps(Trap(mark)))
    assert mark.exists()


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "model.safetensors", "model-00001-of-00001.bin"]
)
def test_pickled_weights_of_a_base_model_are_refused(
    model: Path, tmp_path: Path, mark: Path, name: str
) -> None:
    """Also under the name of another format."""
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    pickled(mark, model / name, tensors)
    with pytest.raises(ConfigError, match=rf"{model}.*safetensors"):
        copied(model, tmp_path / "copy")
    with pytest.raises(ArtefactError, match=f"{model} can't be read"):
        load_base(sealed(model))
    assert not (tmp_path / "copy").exists()
    assert not mark.exists()


def test_pickles_beside_safetensors_are_not_read(model: Path, tmp_path: Path, mark: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    for name in ("pytorch_model.bin", "optimizer.pt", "training_args.bin", "scheduler.pt", "rng_state.pth"):
        pickled(mark, model / name, tensors)
    copied(model, tmp_path / "copy")
    load_base(sealed(model))
    load_tokenizer(model)
    assert not list((tmp_path / "copy").glob("*.bin"))
    assert not mark.exists()


CODE = """
from pathlib import Path
Path({mark!r}).touch()
from transformers import Qwen2Config, Qwen2ForCausalLM, PreTrainedTokenizerFast
class OwnConfig(Qwen2Config):
    model_type = "own"
class OwnModel(Qwen2ForCausalLM):
    config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
OF_MODEL = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
OF_TOKENIZER = {"AutoTokenizer": [None, "own.OwnTokenizer"]}


@pytest.mark.parametrize("known", [True, False], ids=["a known model type", "a type of its own"])
@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_of_a_model_folder_runs_only_where_the_config_says_so(
    model: Path, tmp_path: Path, mark: Path, file: str, known: bool
) -> None:
    (model / "own.py").write_text(CODE.format(mark=str(mark)))
    if file == "config.json":
        kind = {} if known else {"model_type": "own", "architectures": ["OwnModel"]}
        edited(model / file, auto_map=OF_MODEL, **kind)
    else:
        edited(model / file, auto_map=OF_TOKENIZER, **({} if known else {"tokenizer_class": "OwnTokenizer"}))
    sealed(model)
    refusals = []
    for load in (
        lambda: copied(model, tmp_path / "copy"),
        lambda: load_base(model),
        lambda: load_tokenizer(model),
    ):
        try:
            load()  # where transformers knows the type, it takes its own and leaves the code alone
        except LlmppoError as error:
            refusals.append(str(error))
    assert all(str(model) in text and "trust_remote_code" in text for text in refusals)
    assert refusals or known or file == "tokenizer_config.json"
    assert not mark.exists()
    assert not list((tmp_path / "copy").glob("*.py"))
    if file == "config.json" and not known:
        copied(model, tmp_path / "trusted", trust_remote_code=True)
        assert mark.exists()


def test_pickles_in_a_policy_are_not_read(base: Path, tmp_path: Path, mark: Path) -> None:
    agent = tiny_agent()
    policy = tmp_path / "policy"
    agent.save_checkpoint(policy)
    state = {name: tensor.clone() for name, tensor in Checkpoint.open(policy).adapter("actor").items()}
    for name in ("optimizer.pt", "actor/adapter_model.bin", "critic/adapter_model.bin", "value_head.bin"):
        pickled(mark, policy / name, state)
    agent.load_checkpoint(sealed(policy), load_optimizer=True)
    for name in ("actor/adapter_model.safetensors", "value_head.safetensors"):
        (policy / name).rename(policy / "kept")
        with pytest.raises(ArtefactError, match=name):
            agent.load_checkpoint(policy)
        (policy / "kept").rename(policy / name)
    (policy / "optimizer.safetensors").unlink()
    with pytest.warns(UserWarning, match="holds no optimizer state"):
        agent.load_checkpoint(policy, load_optimizer=True)
    pickled(mark, policy / "actor" / "adapter_model.safetensors", state)
    with pytest.raises(ArtefactError, match=r"actor/adapter_model\.safetensors can't be read"):
        agent.load_checkpoint(sealed(policy))
    with pytest.raises(ArtefactError, match=r"actor/adapter_model\.safetensors"):
        load_actor(base, policy, "cpu")
    (policy / "actor" / "adapter_model.safetensors").unlink()
    with pytest.raises(ArtefactError, match=r"adapter_model\.safetensors does not exist"):
        export.write_adapter(policy / "actor", base, tmp_path / "adapter", "base", None)
    assert not mark.exists()


TEMPLATES = {
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.system('touch MARK') }}",
    "popen": "{{ lipsum.__globals__['os'].popen('touch MARK').read() }}",
    "attr": "{{ ''|attr('__class__')|attr('__base__')|attr('__subclasses__')() }}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "method": "{{ raise_exception.__globals__.os }}",
    "changes its input": "{{ messages.clear() }}{{ messages.append(1) }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}{{ os.system('touch MARK') }}",
    "a long range": "{% for i in range(10**9) %}x{% endfor %}",
    "recursion": "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    "arithmetic": "{{ 1 / 0 }}",
    "a type": "{{ messages + 1 }}",
    "absent": "{{ messages[99].content.x.y }}",
    "syntax": "{% for %}",
    "no text": 3,
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_chat_template_can_do_nothing_but_write(model: Path, mark: Path, template: Any) -> None:
    tokenizer = load_tokenizer(model)
    tokenizer.chat_template = template.replace("MARK", str(mark)) if isinstance(template, str) else template
    with pytest.raises(TemplateError, match="chat template"):
        make_framer(tokenizer, strict=False).prompt([{"role": "user", "content": "hello"}])
    assert not mark.exists()


def test_a_template_that_runs_on_names_its_model(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "RENDER_S", 0.5)
    tokenizer = load_tokenizer(model)
    tokenizer.chat_template = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(TemplateError, match=f"{model} can't be rendered: .*still at work after 0.5 s"):
        make_framer(tokenizer).prompt([{"role": "user", "content": "hello"}])
