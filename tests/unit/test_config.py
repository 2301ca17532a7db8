"""Experiment configs: what is refused, and with which words."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from llmppo import config
from llmppo.config import PPOConfig, Section
from llmppo.errors import ConfigError, EnvironmentFault
from llmppo.experiment import (
    import_callables,
    load_experiment,
    merge,
    parse_experiment,
    twins,
    variant_config,
)
from llmppo.plan import Plan
from llmppo.schema import json_schema, key_reference

REPOSITORY = Path(__file__).resolve().parents[2]
TINY: dict[str, Any] = {"name": "study", "base_model": {"kind": "tiny", "warm_start": None}}


def message(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_experiment({**TINY, **changes}, "study.yaml")
    return str(caught.value)


def test_a_typo_names_the_key_and_the_nearest_one() -> None:
    text = message(ppo={"lr_acto": 1.0})
    assert text.startswith("study.yaml:\n  ppo.lr_acto: unknown key; did you mean `lr_actor`?")
    assert "clip_coef" in text.partition("Accepted:")[2]


def test_a_typo_at_the_top_names_the_sections() -> None:
    assert "ppoo: unknown key; did you mean `ppo`?" in message(ppoo={})


def test_a_typo_in_a_section_of_several_kinds_lists_only_that_kind() -> None:
    text = message(base_model={"kind": "gguf", "fil": "x"})
    assert "base_model.fil: unknown key; did you mean `file`? Accepted: file, kind, package" in text


def test_a_wrong_type_shows_the_value() -> None:
    assert "iterations: Input should be a valid integer" in message(iterations="many")
    assert "(got 'many')" in message(iterations="many")


def numbers() -> list[Any]:
    """Every key that holds a number or a list of them: its section, its name, and what holds a value there."""
    found = []
    for section in vars(config).values():
        if not (isinstance(section, type) and issubclass(section, Section)):
            continue
        for name, schema in section.model_json_schema()["properties"].items():
            kinds = [option.get("type") for option in schema.get("anyOf", [schema])]
            items = schema.get("items") or (schema.get("prefixItems") or [{}])[0]
            if {"integer", "number"} & {*kinds, items.get("type")}:
                whole = items.get("type") == "integer" or "integer" in kinds
                found.append(
                    pytest.param(section, name, "array" in kinds, whole, id=f"{section.__name__}.{name}")
                )
    return found


@pytest.mark.parametrize(("section", "name", "listed", "whole"), numbers())
def test_a_number_is_finite_and_no_truth_value(
    section: type[Section], name: str, listed: bool, whole: bool
) -> None:
    for value in (True, False, *(() if whole else ("nan", "inf", float("inf"), float("nan")))):
        with pytest.raises(ValidationError) as caught:
            section.model_validate({name: [value, value] if listed else value})
        assert any(fault["loc"][0] == name for fault in caught.value.errors()), value


def test_a_truth_value_in_a_number_s_place_is_named() -> None:
    assert len(numbers()) > 90
    assert "seeds.1: a number is wanted, not true or false (got True)" in message(seeds=[0, True])
    assert "ppo.vf_clip_coef: a number is wanted" in message(ppo={"vf_clip_coef": True})
    assert "rollout.logit_bias.7: a number" in message(rollout={"logit_bias": {"7": True}})
    assert "stop_at.value: Input should be a finite number" in message(stop_at={"value": "inf"})


def test_a_missing_key_is_required() -> None:
    with pytest.raises(ConfigError, match=r"name: is required"):
        parse_experiment({"base_model": {"kind": "tiny"}})
    assert "base_model.path: is required" in message(base_model={"kind": "pretrained"})


def test_every_fault_is_listed_at_once() -> None:
    text = message(ppo={"lr_acto": 1.0, "batch_size": 0}, iterations=0)
    assert len(text.splitlines()) == 4


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"seeds": [1, 1]}, "seeds repeat"),
        ({"results": "runs/{me}"}, "holds braces, which Snakemake takes for wildcards"),
        ({"evaluation": {"decoding": ["greedy", "greedy"]}}, "a decoding stands here twice"),
        ({"ppo": {"batch_size": 4, "mini_batch_size": 8}}, r"mini_batch_size (8) exceeds batch_size (4)"),
        ({"rollout": {"max_output_tokens": 64, "max_model_len": 64}}, "must be below max_model_len"),
        ({"dataset": {"train": "a.jsonl"}}, "`train` needs `eval`"),
        ({"dataset": {}}, "either `generator` or `train`"),
        ({"lora": {"top_layers": 9}}, "lora.top_layers: 9 exceeds base_model.layers (2)"),
        (
            {"rollout": {"max_model_len": 4096}},
            "rollout.max_model_len: 4096 exceeds base_model.max_positions",
        ),
        ({"variants": {"a": {"seeds": [3]}}}, "variants.a.seeds: a variant may override"),
        ({"variants": {"report": {}}}, "`report` is a folder of every experiment"),
        ({"base_model": {"kind": "gguf", "file": "absent.gguf"}}, "there is no file absent.gguf"),
        ({"name": "two words"}, "name: String should match pattern"),
        ({"base_model": {"kind": "huge"}}, "base_model"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_impossible_values_are_refused(changes: dict[str, Any], expected: str) -> None:
    assert expected in message(**changes)


def test_a_fault_in_a_variant_names_the_variant() -> None:
    text = message(variants={"main": {}, "wide": {"ppo": {"clip_coef": 7}}})
    assert "(variant wide)" in text
    assert "ppo.clip_coef" in text


@pytest.mark.parametrize(
    ("variants", "fault"),
    [
        (
            {"main": {}, "wide": "ppo.clip_coef=0.3"},
            "variants.wide: sections with the keys that it overrides, or {} (got 'ppo",
        ),
        ({"wide": ["ppo"]}, "variants.wide: sections with the keys that it overrides, or {} (got ['ppo'])"),
        (
            {"main": None},
            "variants.main: sections with the keys that it overrides, or {} (nothing stands there)",
        ),
        (["main", "wide"], "variants: names with what each overrides (got ['main', 'wide'])"),
        (None, "variants: names with what each overrides (nothing stands there)"),
        ({}, "variants: names with what each overrides (got {})"),
        (
            {"two words": {}},
            "variants: the name 'two words' can't be a folder; a name has at most 100 letters",
        ),
        ({"a/b": {}}, "variants: the name 'a/b' can't be a folder; a name has at most 100 letters"),
        ({"a": {"seeds": [3]}}, "variants.a.seeds: a variant may override base_model, "),
    ],
    ids=str,
)
def test_a_fault_in_the_form_of_variants_shows_the_right_one(variants: Any, fault: str) -> None:
    text = message(variants=variants)
    assert fault in text
    assert (
        "such as `variants: {main: {}, narrow: {ppo: {clip_coef: 0.1}}}`, where {} is the experiment unchanged"
        in text
    )
    example = yaml.safe_load(text.partition("such as `")[2].partition("`")[0])
    parse_experiment({**TINY, **example})


def test_faults_without_a_key_of_their_own_are_told() -> None:
    told = message(ranks=2, iterations_per_job=5)
    assert "(top level): ranks: a job of several iterations runs in one process" in told
    assert message(env={"factory": "llmppo.envs.guess_number:GuessNumber", "kwargs": {1: 1}}).endswith(
        "env.kwargs: the name 1 is no text"
    )


def test_an_override_outside_its_section_is_told_where_it_belongs() -> None:
    text = message(variants={"main": {}, "narrow": {"clip_coef": 0.1}})
    assert "variants.narrow.clip_coef: a variant may override" in text
    assert text.endswith("write `narrow: {ppo: {clip_coef: ...}}`")


def test_variants_with_the_same_settings_are_warned_of() -> None:
    variants = {
        "main": {},
        "default": {"ppo": {"clip_coef": PPOConfig().clip_coef}},
        "wide": {"ppo": {"clip_coef": 0.3}},
    }
    (warning,) = twins(Plan(parse_experiment({**TINY, "variants": variants})).variants)
    assert warning.startswith("warning: variants.default: its settings are those of variant `main`")
    assert (
        twins(
            Plan(parse_experiment({**TINY, "variants": {"main": {}, "again": {"replays": "main"}}})).variants
        )
        == []
    )


def test_variants_override_nested_keys_and_keep_the_rest() -> None:
    study = parse_experiment(
        {**TINY, "ppo": {"gamma": 0.9}, "variants": {"main": {}, "b": {"ppo": {"clip_coef": 0.1}}}}
    )
    resolved = variant_config(study, "b")
    assert (resolved.ppo.clip_coef, resolved.ppo.gamma) == (0.1, 0.9)
    assert variant_config(study, "main").ppo.clip_coef == 0.2


def test_merge_replaces_lists_and_merges_mappings() -> None:
    assert merge({"a": {"b": 1, "c": [1, 2]}, "d": 1}, {"a": {"c": [3]}}) == {"a": {"b": 1, "c": [3]}, "d": 1}


def test_numbers_in_exponent_form_are_numbers() -> None:
    """YAML 1.1 reads `1e-5` as text."""
    assert parse_experiment({**TINY, **yaml.safe_load("ppo: {lr_actor: 1e-5}")}).ppo.lr_actor == 1e-5


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    twice = tmp_path / "twice.yaml"
    twice.write_text("name: a\nppo:\n  gamma: 1\n  beta: 0\n  gamma: 0.9\n")
    with pytest.raises(
        ConfigError, match=r"twice.yaml is not valid YAML: `gamma` stands here twice"
    ) as fault:
        load_experiment(twice)
    assert "line 3" in str(fault.value)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary.yaml is not valid YAML"):
        load_experiment(binary)


def test_files_that_are_no_yaml_or_absent_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.yaml does not exist"):
        load_experiment(tmp_path / "nowhere.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [1")
    with pytest.raises(ConfigError, match=r"broken.yaml is not valid YAML"):
        load_experiment(broken)
    broken.write_text("- a")
    with pytest.raises(ConfigError, match=r"expected a mapping"):
        load_experiment(broken)


@pytest.mark.parametrize(
    "path", sorted(REPOSITORY.glob("config/**/*.yaml")), ids=lambda path: str(path.relative_to(REPOSITORY))
)
def test_shipped_experiments_are_valid(path: Path) -> None:
    load_experiment(path)


def test_the_schema_is_in_step_with_the_models() -> None:
    path = REPOSITORY / "workflow" / "schemas" / "experiment.schema.json"
    assert path.read_text() == json_schema(), f"run: llmppo schema --out {path.relative_to(REPOSITORY)}"


def test_the_reference_of_keys_is_in_step_with_the_models() -> None:
    manual = (REPOSITORY / "config" / "README.md").read_text()
    assert manual.endswith(key_reference()), (
        "put the output of `llmppo schema --markdown` at the end of config/README.md"
    )


def test_the_schema_accepts_and_refuses_as_the_models_do() -> None:
    import json

    import jsonschema

    schema = json.loads(json_schema())
    jsonschema.validate(yaml.safe_load((REPOSITORY / "config" / "config.yaml").read_text()), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**TINY, "iterationen": 3}, schema)


def test_every_key_has_a_meaning_in_the_reference() -> None:
    lines = [line for line in key_reference().splitlines() if line.startswith("| `")]
    bare = [line.split("`")[1] for line in lines if line.split("|")[4].strip() == ""]
    assert set(bare) <= {"kind"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"env": {"factory": "llmppo.envs.guess_number.GuessNumber"}},
            "env.factory: .*is not of the form `module:name`",
        ),
        ({"env": {"factory": "no_such_module:Task"}}, "env.factory: no module `no_such_module`"),
        (
            {"dataset": {"train": "absent.jsonl", "eval": "absent.jsonl"}},
            "dataset.train: there is no file absent.jsonl",
        ),
        (
            {"base_model": {"kind": "pretrained", "path": "./absent"}},
            "base_model.path: there is no directory ./absent",
        ),
        (
            {
                "dataset": {"generator": "llmppo.envs.reasoning_gym_env:generate", "kwargs": {"train": 5}},
                "base_model": {
                    "kind": "tiny",
                    "warm_start": {
                        "dialogues": "llmppo.envs.reasoning_gym_env:demonstration",
                        "kwargs": {"seed": 0, "train": 6},
                    },
                },
            },
            r"base_model.warm_start.kwargs.train: 6, but the dataset has 5; .*held out",
        ),
        (
            {"base_model": {"kind": "tiny", "quantization": {"bits": 4}}, "rollout": {"vllm": {}}},
            "base_model.quantization: vLLM would sample from the base without it",
        ),
        (
            {"ppo": {"use_liger_loss": True}, "rollout": {"top_k": 20}},
            "ppo.use_liger_loss: Liger scores over the whole vocabulary",
        ),
        ({"base_model": {"kind": "tiny", "heads": 3}}, r"base_model.heads: 3 must divide hidden_size \(96\)"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_experiment({"name": "x", "base_model": {"kind": "tiny"}, **changes})


@pytest.mark.parametrize(
    ("env", "fault"),
    [
        (
            {"factory": "llmppo.envs.guess_number:GuesNumber"},
            r"env\.factory: .* has no `GuesNumber`; did you mean `GuessNumber`",
        ),
        (
            {"factory": "llmppo.envs.dataset_env:DatasetEnv", "kwargs": {"reward": "no_such_module:f"}},
            r"env\.kwargs\.reward: no module `no_such_module`",
        ),
        (
            {
                "factory": "llmppo.envs.dataset_env:DatasetEnv",
                "kwargs": {"rewards": [{"name": "a", "function": "llmppo.envs.rewards:exact_mach"}]},
            },
            r"env\.kwargs\.rewards, part 1 \(a\): .*did you mean `exact_match`",
        ),
    ],
)
def test_validation_imports_what_a_config_names(env: dict[str, Any], fault: str) -> None:
    experiment = parse_experiment({"name": "x", "base_model": {"kind": "tiny"}, "env": env})
    with pytest.raises(ConfigError, match=fault):
        import_callables(experiment)


GAME = "llmppo.envs.guess_number:GuessNumber"
DATASET = "llmppo.envs.dataset_env:DatasetEnv"
TAKERS = """
class Anything:
    def __init__(self, words, **others): ...
    def reset(self, seed=None): ...
    def step(self, text): ...
class Picky(Anything):
    def __init__(self, level):
        raise ValueError(f"no level {level}")
def no_rows(seed): ...
def two_words(completion, answer): ...
def with_row(completion, answer, question, row): ...
"""


@pytest.fixture
def takers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """To be in a folder with the module `takers`."""
    (tmp_path / "takers.py").write_text(TAKERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("takers", None)


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        (
            {"env": {"kwargs": {"number": 9}}},
            rf"env\.kwargs: unknown argument 'number', did you mean `numbers`\?; {GAME} takes "
            r"\(numbers: int = 15, tries: int = 4, ",
        ),
        (
            {"variants": {"a": {}, "b": {"env": {"kwargs": {"trys": 9}}}}},
            r"env\.kwargs: unknown argument 'trys'",
        ),
        ({"env": {"kwargs": {"tries": 0}}}, r"env\.kwargs: .*tries \(0\) must be at least 1"),
        ({"env": {"factory": "takers:Anything"}}, r"env\.kwargs: .*'words'; takers:Anything takes \(words, "),
        (
            {"env": {"factory": "takers:Picky", "kwargs": {"level": 3}}},
            r"env\.factory takers:Picky raised ValueError: no level 3",
        ),
        (
            {"env": {"factory": DATASET}},
            r"env\.kwargs: .*'train_path'; add a `dataset` section, which provides train_path and eval_path;",
        ),
        (
            {"base_model": {"kind": "tiny", "warm_start": {"kwargs": {"player": {}}}}},
            r"base_model\.warm_start\.kwargs: unknown argument 'player', did you mean `players`\?; "
            r"llmppo\.envs\.guess_number:demonstration takes .*, called with \(rng\) before them",
        ),
        (
            {"dataset": {"generator": "takers:no_rows", "kwargs": {"rows": 3}}},
            r"dataset\.kwargs: unknown argument 'rows'; takers:no_rows takes \(seed\)",
        ),
        (
            {"env": {"factory": DATASET, "kwargs": {"reward": "takers:two_words"}}},
            r"env\.kwargs\.reward: .*; takers:two_words takes \(completion, answer\), called with \(completion, answer, question\)",
        ),
        (
            {
                "env": {
                    "factory": DATASET,
                    "kwargs": {"rewards": [{"name": "a", "function": "takers:with_row", "wieght": 2}]},
                }
            },
            r"env\.kwargs\.rewards, part 1: .*wieght",
        ),
        (
            {"env": {"factory": DATASET, "kwargs": {"reward": 3}}},
            r"env\.kwargs\.reward: 3 is not of the form",
        ),
    ],
)
def test_validation_compares_arguments_with_what_is_called(
    values: dict[str, Any], fault: str, takers: None
) -> None:
    experiment = parse_experiment({**TINY, **values})
    with pytest.raises((ConfigError, EnvironmentFault), match=fault):
        import_callables(experiment)


@pytest.mark.parametrize(
    "values",
    [
        {"env": {"factory": "takers:Anything", "kwargs": {"words": 1, "whatever": 2}}},
        {
            "dataset": {"generator": "llmppo.envs.larger_number:generate"},
            "env": {"factory": DATASET, "kwargs": {"reward": "takers:with_row"}},
        },
    ],
)
def test_validation_accepts_what_can_be_called(values: dict[str, Any], takers: None) -> None:
    import_callables(parse_experiment({**TINY, **values}))


def test_repetition_penalty_is_refused_without_the_advice_on_top_k() -> None:
    with pytest.raises(
        ConfigError, match="repetition_penalty, which depends on what was said before"
    ) as raised:
        parse_experiment(
            {"name": "x", "base_model": {"kind": "tiny"}, "rollout": {"repetition_penalty": 1.2, "top_k": 5}}
        )
    assert "top_k" not in str(raised.value)
