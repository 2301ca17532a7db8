"""Damaged rollouts, datasets and policies: each is read as it was meant, or refused by its file. The same cases in every run.

Files that agree with their manifest come first: what a manifest or a checksum finds is found before anything is read.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from llmppo.envs.dataset_rows import read_rows
from llmppo.errors import ArtefactError, LlmppoError
from llmppo.experiment import parse_experiment, variant_config
from llmppo.files import write_manifest
from llmppo.reporting import transcripts
from llmppo.stage_settings import stage_settings
from llmppo.stages import base_model, critic_warmup, rollout, update
from llmppo.testing.batches import made_up_batch, tiny_agent
from llmppo.testing.deadlines import deadline
from llmppo.trajectories.episode import Episode, EpisodeSpec, StopReason, Turn
from llmppo.trajectories.parquet import read_episodes, read_metadata, write_episodes

REPOSITORY = Path(__file__).resolve().parents[2]
DEADLINE_S = 5.0


def fuzz(cases: int) -> settings:
    return settings(
        derandomize=True, database=None, deadline=None, max_examples=cases, suppress_health_check=list(HealthCheck),
        phases=[Phase.generate], report_multiple_bugs=False,
    )  # fmt: skip


def refusal(read: Callable[[], Any], file: Path) -> str | None:
    """Why `read` refused, naming the file; None where it took it."""
    with deadline(DEADLINE_S):
        try:
            read()
        except LlmppoError as error:
            text = str(error)
        else:
            return None
    assert str(file) in text, text
    assert len(text) < 10_000
    return text


def draw_bytes(data: st.DataObject, content: bytes) -> bytes:
    """Cut off, one bit flipped, or something put in between."""
    at = data.draw(st.integers(0, len(content) - 1))
    match data.draw(st.sampled_from(["cut", "flip", "flip", "insert", "all"])):
        case "cut":
            return content[:at]
        case "flip":
            return content[:at] + bytes([content[at] ^ 1 << data.draw(st.integers(0, 7))]) + content[at + 1 :]
        case "insert":
            return content[:at] + data.draw(st.binary(min_size=1, max_size=9)) + content[at:]
    return data.draw(st.binary(max_size=40))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


# --- rollouts


def an_episode(index: int, turns: int) -> Episode:
    return Episode(
        spec=EpisodeSpec(seed=9, split="train", iteration=1, index=index),
        task_id=f"t{index}",
        token_ids=np.arange(3 + 4 * turns, dtype=np.int32),
        sampling_logprobs=np.full(2 * turns, -0.5, np.float32),
        sampling_supports=[np.array([1, 5], np.int32)] * (2 * turns) if index else None,
        turns=tuple(
            Turn(
                start=3 + 4 * turn, end=5 + 4 * turn, reward=0.5, stop_reason=StopReason.EOS, invalid=False,
                observation="o", action="a",
            )
            for turn in range(turns)
        ),
        terminated=True,
        truncated=False,
        success=bool(index),
        info={"guess": index},
    )  # fmt: skip


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("sound") / "shard-0.parquet"
    write_episodes(file, [an_episode(0, 2), an_episode(1, 1), an_episode(2, 0)], {"a": 1})
    return file


TYPES = [pa.int8(), pa.int64(), pa.uint32(), pa.float64(), pa.string(), pa.large_string(), pa.binary(), pa.bool_(), pa.null(),
         pa.list_(pa.int32()), pa.list_(pa.list_(pa.float32())), pa.timestamp("s"), pa.dictionary(pa.int8(), pa.string()),
         pa.struct([("a", pa.int32())])]  # fmt: skip
VALUES = [None, 0, -1, 2**31 - 1, 2**63 - 1, 0.5, float("nan"), float("inf"), "", "x", "eos", "{", "[]", "3", '{"a": NaN}', "[" * 3000,
          True, [], [0], [None], [float("nan")], [[1]], ["eos"], [True] * 9, [0] * 40, [-1], [10**6]]  # fmt: skip


def other_table(data: st.DataObject, table: pa.Table) -> pa.Table:
    """The table with one thing other than it was written."""
    name = data.draw(st.sampled_from(table.column_names))
    at, kind = table.column_names.index(name), table.schema.field(name)
    how = data.draw(
        st.sampled_from(
            [
                "value",
                "value",
                "value",
                "value",
                "drop",
                "rename",
                "type",
                "order",
                "add",
                "twice",
                "rows",
                "metadata",
            ]
        )
    )
    match how:
        case "value":
            column = table.column(name).to_pylist()
            row = data.draw(st.integers(0, len(column) - 1))
            column[row] = data.draw(st.sampled_from(VALUES) | st.sampled_from(column))
            try:
                array = pa.array(column, kind.type)
            except (pa.ArrowException, TypeError, ValueError, OverflowError):
                array = pa.nulls(len(column), kind.type)
            return table.set_column(at, kind.with_nullable(kind.nullable or array.null_count > 0), array)
        case "drop":
            return table.drop_columns([name])
        case "rename":
            return table.rename_columns([f"{old}x" if old == name else old for old in table.column_names])
        case "type":
            type_ = data.draw(st.sampled_from(TYPES))
            return table.set_column(at, pa.field(name, type_), pa.nulls(len(table), type_))
        case "order":
            return table.select(data.draw(st.permutations(table.column_names)))
        case "add":
            return table.append_column("extra", pa.nulls(len(table), data.draw(st.sampled_from(TYPES))))
        case "twice":
            return table.append_column(kind, table.column(name))
        case "rows":
            return table.take(
                pa.array(data.draw(st.lists(st.integers(0, len(table) - 1), max_size=4)), pa.int64())
            )
    facts = dict(table.schema.metadata)
    key = data.draw(st.sampled_from(sorted(facts)))
    text = data.draw(st.sampled_from([None, b"", b"{", b"[1]", b"\xff", b"99", b"update"]))
    return table.replace_schema_metadata(
        {**facts, key: text} if text is not None else {k: v for k, v in facts.items() if k != key}
    )


@fuzz(300)
@given(data=st.data())
def test_damaged_rollouts_are_refused_by_their_file(
    tmp_path_factory: Any, shard: Path, data: st.DataObject
) -> None:
    file = shard.with_name("damaged.parquet")
    sound = shard.read_bytes()
    if data.draw(st.booleans()):
        file.write_bytes(draw_bytes(data, sound))
        changed = file.read_bytes() != sound
    else:
        table = pq.read_table(shard)
        other = other_table(data, table)
        pq.write_table(other, file, row_group_size=data.draw(st.integers(1, 4)))
        changed = not other.equals(table, check_metadata=True)
    told = [
        refusal(read, file)
        for read in (
            lambda: read_episodes(file),
            lambda: read_metadata(file),
            lambda: transcripts.read_episodes(file, transcripts.COLUMNS),
        )
    ]
    assert changed or told == [None, None, None]
    if told[0] is None:
        assert all(isinstance(episode, Episode) for episode in read_episodes(file))


# --- datasets


@fuzz(150)
@given(data=st.data())
def test_damaged_datasets_are_refused_by_their_file(tmp_path_factory: Any, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("dataset")
    rows = [{"question": f"q{number}", "answer": str(number), "more": [number]} for number in range(3)]
    saved = Path(__file__).parents[1] / "data" / "saved-dataset"
    match data.draw(st.sampled_from(["jsonl", "parquet", "folder"])):
        case "jsonl":
            path = damaged = folder / "rows.jsonl"
            if data.draw(st.booleans()):
                rows[1][data.draw(st.sampled_from(["question", "answer", "more", "new"]))] = data.draw(JSON)
            path.write_text("\n".join(json.dumps(row) for row in rows))
        case "parquet":
            path = damaged = folder / "rows.parquet"
            table = pa.Table.from_pylist(rows)
            pq.write_table(
                table
                if data.draw(st.booleans())
                else other_table(data, table.replace_schema_metadata({b"a": b"1"})),
                path,
            )
        case _:
            path = shutil.copytree(saved, folder / "saved")
            damaged = data.draw(st.sampled_from(sorted(file for file in path.rglob("*") if file.is_file())))
            if damaged.suffix == ".json" and data.draw(st.booleans()):
                damaged.write_text(json.dumps(data.draw(JSON)))
    if data.draw(st.booleans()):
        damaged.write_bytes(draw_bytes(data, damaged.read_bytes()))
    refusal(lambda: read_rows(path), path)


# --- policies


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy") / "0001"
    agent = tiny_agent(lr_actor=1e-3, lr_critic=1e-3)
    agent.learn(made_up_batch())
    agent.save_checkpoint(folder)
    return folder


DTYPES = [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8]


def hurt_tensors(data: st.DataObject, file: Path) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    name = data.draw(st.sampled_from(sorted(tensors)))
    tensor = tensors[name]
    match data.draw(
        st.sampled_from(
            ["shape", "rank", "dtype", "nan", "inf", "gone", "more", "renamed", "scalar", "empty", "none"]
        )
    ):
        case "shape":
            tensors[name] = torch.zeros(*tensor.shape, 2)
        case "rank":
            tensors[name] = torch.zeros([size + 1 for size in tensor.shape])
        case "dtype":
            tensors[name] = tensor.to(data.draw(st.sampled_from(DTYPES)))
        case "nan":
            tensors[name] = torch.full_like(tensor, torch.nan)
        case "inf":
            tensors[name] = torch.full_like(tensor, -torch.inf)
        case "gone":
            del tensors[name]
        case "more":
            tensors[f"{name}.more"] = tensor.clone()
        case "renamed":
            tensors[name.replace("lora", "dora") + "x"] = tensors.pop(name)
        case "scalar":
            tensors[name] = torch.tensor(1.0)
        case "empty":
            tensors[name] = torch.zeros(0)
        case "none":
            tensors = {}
    save_file(tensors, file)


def hurt_json(data: st.DataObject, file: Path) -> None:
    values = json.loads(file.read_text())
    path: list[str] = []
    held: Any = values
    while isinstance(held, dict) and held and (not path or data.draw(st.booleans())):
        path.append(data.draw(st.sampled_from(sorted(held))))
        held = held[path[-1]]
    section: Any = values
    for part in path[:-1]:
        section = section[part]
    if data.draw(st.booleans()):
        section[path[-1]] = data.draw(
            JSON | st.sampled_from([-1, 0, 10**30, "all-linear", "../x", ["q_proj"], float("nan")])
        )
    else:
        del section[path[-1]]
    file.write_text(json.dumps(values))


@fuzz(200)
@given(data=st.data())
def test_damaged_policies_are_refused_by_their_folder(
    policy: Path, tmp_path_factory: Any, data: st.DataObject
) -> None:
    folder = policy.with_name("damaged")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(policy, folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "README.md")
    file = data.draw(st.sampled_from(files))
    how = data.draw(st.sampled_from(["content", "content", "content", "bytes", "gone", "a folder"]))
    if how == "content":
        hurt_tensors(data, file) if file.suffix == ".safetensors" else hurt_json(data, file)
    elif how == "bytes":
        file.write_bytes(draw_bytes(data, file.read_bytes()))
    else:
        file.unlink()
        if how == "a folder":
            file.mkdir()
    if file.name != "manifest.json" and data.draw(st.sampled_from([True, True, True, False])):
        (folder / "manifest.json").unlink()
        write_manifest(folder, kind="policy")
    agent = tiny_agent(trained=False, lr_actor=1e-3, lr_critic=1e-3)
    told = refusal(
        lambda: agent.load_checkpoint(folder, load_optimizer=True, restore_hyperparameters=True), folder
    )
    if told is None:
        for name in agent.model.adapters:
            assert all(
                bool(torch.isfinite(tensor).all()) for tensor in agent.model.adapter_state(name).values()
            )


@pytest.mark.parametrize("wrong", [10**6, -3], ids=["too large", "negative"])
@pytest.mark.parametrize("column", ["token_ids", "sampling_supports"])
def test_tokens_of_another_model_are_refused(tmp_path: Path, column: str, wrong: int) -> None:
    """By both stages that train, before anything is computed."""
    values = yaml.safe_load((REPOSITORY / "config" / "test" / "tiny.yaml").read_text())
    values["rollout"] |= {"top_k": 3}
    config = variant_config(parse_experiment(values), "main")
    base, policy = tmp_path / "base", tmp_path / "policy" / "0000"
    base_model.run(stage_settings(config, "base_model"), seed=0, out=base)
    warming = stage_settings(config, "critic_warmup")
    warming["ppo"]["critic_warmup_steps"] = 0
    critic_warmup.run(warming, base=base, seed=0, rollouts=[], out=policy, metrics=tmp_path / "m.json")
    for split, iteration in (("warmup", 1), ("train", 1)):
        file = tmp_path / split / "shard-0.parquet"
        rollout.run(
            stage_settings(config, "rollout"), base=base, policy=policy, dataset=None, seed=0, split=split, iteration=iteration,
            shard=0, out=file,
        )  # fmt: skip
        table = pq.read_table(file)
        rows, at = table.column(column).to_pylist(), table.column_names.index(column)
        if column == "token_ids":
            rows[1][0] = wrong
        else:
            sampled = next(number for number, support in enumerate(rows[1]) if support)
            rows[1][sampled][0] = wrong
        field = table.schema.field(column)
        pq.write_table(table.set_column(at, field, pa.array(rows, field.type)), file)
    told = rf"{{}}: {{}}-0001-00001 has token ids from .*{wrong}.*, the base model's are 0 to"
    with pytest.raises(ArtefactError, match=told.format(tmp_path / "warmup", "warmup")):
        critic_warmup.run(
            stage_settings(config, "critic_warmup"), base=base, seed=0, rollouts=[tmp_path / "warmup" / "shard-0.parquet"],
            out=tmp_path / "out", metrics=tmp_path / "m.json",
        )  # fmt: skip
    with pytest.raises(ArtefactError, match=told.format(tmp_path / "train", "train")):
        update.run(
            stage_settings(config, "update"), base=base, policy=policy, seed=0, iteration=1, out=tmp_path / "out",
            advantages=tmp_path / "a.parquet", metrics=tmp_path / "m.json", rollouts=[tmp_path / "train" / "shard-0.parquet"],
        )  # fmt: skip
    assert not (tmp_path / "out").exists()
