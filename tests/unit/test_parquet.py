"""Episode files: exact round trips, equal bytes, refused damage, and three readers that people use."""

import dataclasses

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmppo.errors import ArtefactError, TrajectoryError
from llmppo.trajectories.episode import Episode, EpisodeSpec, StopReason, Turn
from llmppo.trajectories.parquet import (
    read_episodes,
    read_metadata,
    write_episodes,
    write_update_columns,
)
from llmppo.trajectories.schema import EPISODE_SCHEMA, TOKEN_LISTS, TURN_LISTS


def turn(start, end, reward=0.0, reason=StopReason.EOS, invalid=False, observation="o", action="a"):
    return Turn(
        start=start,
        end=end,
        reward=reward,
        stop_reason=reason,
        invalid=invalid,
        observation=observation,
        action=action,
    )


def episode(index, tokens, turns, *, logprobs=None, **facts):
    sampled = sum(entry.end - entry.start for entry in turns)
    defaults = {"task_id": f"t{index}", "terminated": True, "truncated": False, "success": False, "info": {}}
    return Episode(
        spec=EpisodeSpec(seed=9, split="train", iteration=1, index=index),
        token_ids=np.arange(tokens, dtype=np.int32),
        sampling_logprobs=np.asarray(
            logprobs if logprobs is not None else -np.arange(1, sampled + 1) / 8, np.float32
        ),
        turns=tuple(turns),
        **(defaults | facts),
    )


TWO_TURNS = episode(
    1,
    9,
    [turn(2, 4, 0.5, observation="first é"), turn(6, 9, -1.0, StopReason.LENGTH, True, action="b\n\"'")],
    info={"guess": [1, None], "nested": {"a": 0.5}},
    success=True,
)
NO_TURNS = episode(2, 3, [], terminated=False, truncated=True)
GAPS = episode(0, 5, [turn(1, 3), turn(3, 3, 1.0, StopReason.STOP)], logprobs=[np.nan, -0.25])
EPISODES = [TWO_TURNS, NO_TURNS, GAPS]


def same(first, second):
    assert first.spec == second.spec
    assert (first.task_id, first.turns, first.info) == (second.task_id, second.turns, second.info)
    assert (first.terminated, first.truncated, first.success) == (
        second.terminated,
        second.truncated,
        second.success,
    )
    np.testing.assert_array_equal(first.token_ids, second.token_ids)
    np.testing.assert_array_equal(first.sampling_logprobs, second.sampling_logprobs)
    assert first.token_ids.dtype == second.token_ids.dtype == np.int32
    assert first.sampling_logprobs.dtype == second.sampling_logprobs.dtype == np.float32


def test_supports_stay_with_their_tokens(tmp_path):
    """Null, not empty, where a token had none or wasn't sampled; an episode without any has none."""
    supports = [np.array([0, 7], np.int32), None, np.array([4], np.int32)]
    restricted = episode(3, 6, [turn(2, 4), turn(5, 6)], sampling_supports=supports)
    write_episodes(tmp_path / "a", [TWO_TURNS, restricted], {})
    free, read = read_episodes(tmp_path / "a")
    same(read, restricted)
    assert free.sampling_supports is None
    assert [None if s is None else s.tolist() for s in read.sampling_supports] == [[0, 7], None, [4]]
    column = pq.read_table(tmp_path / "a").column("sampling_supports").to_pylist()
    assert column[1] == [None, None, [0, 7], None, None, [4]]
    with pytest.raises(TrajectoryError, match="2 sampling supports for 3 sampled tokens"):
        episode(4, 6, [turn(2, 4), turn(5, 6)], sampling_supports=supports[:2])


def test_reading_gives_what_was_written_in_order(tmp_path):
    path = tmp_path / "shard-0.parquet"
    write_episodes(path, EPISODES, {"temperature": 0.5, "policy": "0000"})
    for first, second in zip(read_episodes(path), [GAPS, TWO_TURNS, NO_TURNS], strict=True):
        same(first, second)
    assert read_metadata(path) == {"temperature": 0.5, "policy": "0000"}
    assert type(read_episodes(path)[1].turns[0].reward) is float
    assert type(read_episodes(path)[1].turns[0].invalid) is bool


def test_several_files_are_merged_and_an_episode_must_be_in_one(tmp_path):
    write_episodes(tmp_path / "b", [TWO_TURNS], {})
    write_episodes(tmp_path / "a", [NO_TURNS, GAPS], {})
    indices = [found.spec.index for found in read_episodes([tmp_path / "a", tmp_path / "b"])]
    assert indices == [0, 1, 2]
    with pytest.raises(ArtefactError, match=r"b: episode train-0001-00001 is in .*/b already"):
        read_episodes([tmp_path / "b", tmp_path / "b"])
    with pytest.raises(ArtefactError, match="train-0001-00001 occurs twice"):
        write_episodes(tmp_path / "c", [TWO_TURNS, TWO_TURNS], {})


def test_writing_again_gives_the_same_bytes_whatever_the_order(tmp_path):
    write_episodes(tmp_path / "a", EPISODES, {"x": 1, "y": 2})
    write_episodes(tmp_path / "b", EPISODES[::-1], {"y": 2, "x": 1})
    write_episodes(tmp_path / "c", read_episodes(tmp_path / "a"), read_metadata(tmp_path / "a"))
    contents = {(tmp_path / name).read_bytes() for name in "abc"}
    assert len(contents) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


def test_a_file_without_episodes_is_read_back(tmp_path):
    write_episodes(tmp_path / "none", [], {})
    assert read_episodes(tmp_path / "none") == []
    assert pq.read_schema(tmp_path / "none").equals(EPISODE_SCHEMA)
    write_update_columns(tmp_path / "update", [], **{name: [] for name in UPDATES}, metadata={})
    assert pq.read_table(tmp_path / "update").num_rows == 0


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_episode_survives(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("any") / "episodes.parquet"
    episodes = []
    for index in range(data.draw(st.integers(0, 3))):
        position, turns = data.draw(st.integers(1, 4)), []
        for _ in range(data.draw(st.integers(0, 3))):
            end = position + data.draw(st.integers(0, 4))
            text = data.draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=5))
            reward = data.draw(st.floats(width=32, allow_nan=False, allow_infinity=False))
            reason = data.draw(st.sampled_from(StopReason))
            turns.append(turn(position, end, reward, reason, data.draw(st.booleans()), text, text))
            position = end + data.draw(st.integers(0, 3))
        episodes.append(episode(index, position + data.draw(st.integers(0, 2)), turns))
    write_episodes(path, episodes, {})
    for first, second in zip(read_episodes(path), episodes, strict=True):
        same(first, second)


def rewrite(path, name, column, metadata=None):
    table = pq.read_table(path)
    place = table.column_names.index(name)
    table = table.set_column(place, table.schema.field(name), pa.array(column, table.schema.field(name).type))
    pq.write_table(table.replace_schema_metadata(metadata or table.schema.metadata), path)


@pytest.mark.parametrize(
    ("name", "column", "message"),
    [
        ("turn_ids", [[-1, 0, 0, -1, -1], [-1] * 8, [-1] * 3], "token lists differ in length"),
        ("actions", [["a"], ["a", "a"], []], "turn lists differ in length"),
        ("turn_starts", [[1, 3], [2, 3], []], "turn 1 spans"),
        ("turn_ends", [[3, 3], [5, 9], []], "5 sampling log-probs for 6"),
        (
            "action_mask",
            [[False, True, True, False, False], [i in (2, 3, 5, 6, 7) for i in range(9)], [False] * 3],
            "action_mask disagree",
        ),
        ("num_turns", [2, 2, 1], "num_turns is 1, but"),
        ("num_action_tokens", [2, 4, 0], "num_action_tokens is 4, but"),
        ("stop_reasons", [["eos", "stop"], ["eos", "tired"], []], "'tired' is not a valid StopReason"),
        ("episode_index", [0, 1, 5], "episode_id is 'train-0001-00002', but"),
        ("info", ["{}", "{", "{}"], "Expecting"),
    ],
)
def test_an_inconsistent_row_is_refused_by_file_and_episode(tmp_path, name, column, message):
    path = tmp_path / "shard-0.parquet"
    write_episodes(path, EPISODES, {})
    rewrite(path, name, column)
    with pytest.raises(ArtefactError, match=rf"shard-0\.parquet, episode train-0001-0000\d: .*({message})"):
        read_episodes(path)


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "shard-0.parquet"
    with pytest.raises(ArtefactError, match="does not exist"):
        read_episodes(path)
    write_episodes(path, EPISODES, {})
    rewrite(path, "num_turns", [2, 2, 0], {"llmppo.schema": "episodes", "llmppo.schema_version": "99"})
    with pytest.raises(ArtefactError, match=r"99.*not episodes of version 2"):
        read_episodes(path)
    with pytest.raises(ArtefactError, match=r"no llmppo\.metadata"):
        read_metadata(path)
    write_update_columns(path, EPISODES, **UPDATES, metadata={})
    with pytest.raises(ArtefactError, match="update"):
        read_episodes(path)
    write_episodes(path, EPISODES, {})
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ArtefactError, match="not a readable Parquet file"):
        read_episodes(path)


@pytest.fixture
def episodes_file(tmp_path):
    write_episodes(tmp_path / "episodes.parquet", EPISODES, {})
    return str(tmp_path / "episodes.parquet")


def test_duckdb_unnests_tokens_and_turns(episodes_file):
    tokens = duckdb.sql(
        f"SELECT episode_id, {', '.join(f'unnest({name}) AS {name}' for name in TOKEN_LISTS)} FROM '{episodes_file}'"
    )
    sampled = "SELECT count(*), count(sampling_logprobs), min(token_ids) FROM tokens WHERE action_mask"
    assert duckdb.sql(sampled).fetchall() == [(7, 6, 1)]
    assert tokens.count("*").fetchall() == [(17,)]
    turns = duckdb.sql(
        f"SELECT \"return\", {', '.join(f'unnest({name}) AS {name}' for name in TURN_LISTS)} FROM '{episodes_file}' WHERE num_turns = 2 AND success"
    )
    assert turns.project('turn_rewards, stop_reasons, observations, "return"').fetchall() == [
        (0.5, "eos", "first é", -0.5),
        (-1.0, "length", "o", -0.5),
    ]


def test_pandas_explodes_tokens_and_turns(episodes_file):
    frame = pd.read_parquet(episodes_file)
    tokens = frame.explode(list(TOKEN_LISTS)).dropna(subset="token_ids")
    assert len(tokens) == 17
    assert tokens["action_mask"].astype(bool).sum() == 7
    turns = frame[["episode_id", *TURN_LISTS]].explode(list(TURN_LISTS)).dropna(subset="turn_starts")
    assert turns.groupby("episode_id")["turn_rewards"].sum().to_dict() == {
        "train-0001-00000": 1.0,
        "train-0001-00001": -0.5,
    }


def test_pyarrow_reads_the_scalars(episodes_file):
    table = pq.read_table(episodes_file, columns=["return", "num_action_tokens", "truncated"])
    assert table.to_pylist() == [
        {"return": 1.0, "num_action_tokens": 2, "truncated": False},
        {"return": -0.5, "num_action_tokens": 5, "truncated": False},
        {"return": 0.0, "num_action_tokens": 0, "truncated": True},
    ]


UPDATES = {
    "old_logprobs": [np.arange(5) + 0.5, [], [7.5, np.nan]],
    "ref_logprobs": None,
    "values": [np.zeros(5), [], [1, 2]],
    "advantages": [np.arange(5), [], [3, 4]],
    "returns": [np.ones(5), [], [5, 6]],
}


def test_update_columns_stand_at_their_tokens(tmp_path, episodes_file):
    path = tmp_path / "advantages.parquet"
    write_update_columns(path, EPISODES, **UPDATES, metadata={"iteration": 1})
    rows = pq.read_table(path).to_pylist()
    assert [row["episode_id"] for row in rows] == [f"train-0001-0000{index}" for index in range(3)]
    assert rows[0]["advantages"] == [None, 3, 4, None, None]
    assert rows[0]["old_logprobs"] == [None, 7.5, None, None, None]
    assert rows[1]["old_logprobs"] == [None, None, 0.5, 1.5, None, None, 2.5, 3.5, 4.5]
    assert rows[1]["ref_logprobs"] == [None] * 9
    assert rows[2]["returns"] == [None] * 3
    joined = duckdb.sql(
        f"SELECT unnest(action_mask) AS sampled, unnest(returns) AS returns FROM '{episodes_file}' JOIN '{path}' USING (episode_id)"
    )
    assert joined.filter("sampled != (returns IS NOT NULL)").fetchall() == []
    assert joined.sum("returns").fetchall() == [(16.0,)]


def test_update_columns_of_another_length_are_refused(tmp_path):
    wrong = UPDATES | {"values": [np.zeros(4), [], [1, 2]]}
    with pytest.raises(
        ArtefactError, match=r"values of train-0001-00001 has shape \(4,\) for 5 sampled tokens"
    ):
        write_update_columns(tmp_path / "a", EPISODES, **wrong, metadata={})
    assert list(tmp_path.iterdir()) == []


def test_missing_logprobs_are_null_and_come_back_as_nan(tmp_path):
    write_episodes(tmp_path / "a", [dataclasses.replace(GAPS)], {})
    (row,) = pq.read_table(tmp_path / "a").to_pylist()
    assert row["sampling_logprobs"] == [None, None, -0.25, None, None]
    assert np.isnan(read_episodes(tmp_path / "a")[0].sampling_logprobs).tolist() == [True, False]
