"""One episode: what the model saw, why it ended, and what an environment may return."""

import json

import numpy as np
import pytest

from llmppo.config import EnvConfig, SamplingConfig
from llmppo.engines.base import Generation
from llmppo.envs.harness import RolloutHarness, row_for
from llmppo.envs.loading import harness_factory, make_env
from llmppo.errors import ArtefactError, ConfigError, EnvironmentFault, TemplateError, TrajectoryError
from llmppo.seeding import derive_seed
from llmppo.testing import CountdownEnv, tiny_tokenizer
from llmppo.trajectories.episode import EpisodeSpec, StopReason

TOKENIZER = tiny_tokenizer()
END = TOKENIZER.eos_token_id
SPEC = EpisodeSpec(seed=3, split="train", iteration=2, index=5)


def encode(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def reply(text, *, end=True, stop_reason=None):
    ids = encode(text) + ([END] if end else [])
    reason = stop_reason or (StopReason.EOS if end else StopReason.LENGTH)
    return Generation(
        token_ids=ids, logprobs=-np.arange(1, len(ids) + 1, dtype=np.float32), stop_reason=reason
    )


class Env:
    """Answers each reply with the next of the given steps; records what it was asked."""

    def __init__(self, *steps, observation="Go.", info=None):
        self.steps, self.observation, self.info = list(steps), observation, info or {}
        self.seen, self.resets = [], []

    def reset(self, **arguments):
        self.resets.append(arguments)
        return self.observation, self.info

    def step(self, action):
        self.seen.append(action)
        return self.steps.pop(0)


def step(observation="More.", reward=0.0, terminated=False, truncated=False, **info):
    return observation, reward, terminated, truncated, info


def harness(env, **settings):
    return RolloutHarness.local(env, TOKENIZER, **({"max_turns": 4} | settings))


def play(env, *replies, **settings):
    running = harness(env, **settings)
    running.begin(SPEC)
    for generation in replies:
        assert running.request() is not None
        running.advance(generation)
    assert running.request() is None
    return running.episode()


def test_a_two_turn_episode_token_by_token():
    env = Env(step(reward=0.25), step("Bye.", 0.5, terminated=True, success=True), info={"task_id": "t"})
    episode = play(env, reply("A"), reply("B"))
    text = (
        "<|im_start|>user\nGo.<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
        "<|im_start|>user\nMore.<|im_end|>\n<|im_start|>assistant\nB<|im_end|>"
    )
    assert TOKENIZER.decode(episode.token_ids) == text
    assert TOKENIZER.decode(episode.token_ids[episode.action_mask]) == "A<|im_end|>B<|im_end|>"
    assert episode.sampling_logprobs.tolist() == [-1, -2, -1, -2]
    assert [turn.observation for turn in episode.turns] == ["Go.", "More."]
    assert [turn.action for turn in episode.turns] == ["A", "B"] == env.seen
    assert [turn.reward for turn in episode.turns] == [0.25, 0.5]
    assert (episode.terminated, episode.truncated, episode.success) == (True, False, True)
    assert episode.task_id == "t"


def test_sampled_ids_are_never_encoded_again():
    """`user` is one token; sampled as four it stays four, also in the next request."""
    ids = [token for letter in "user" for token in encode(letter)]
    assert encode("user") != ids
    running = harness(Env(step(), step(terminated=True)))
    running.begin(SPEC)
    prompt = list(running.request().token_ids)
    sampled = Generation(token_ids=[*ids, END], logprobs=np.zeros(5, np.float32), stop_reason=StopReason.EOS)
    running.advance(sampled)
    assert running.request().token_ids[: len(prompt) + 5] == [*prompt, *ids, END]


def test_seeds_come_from_the_spec():
    env = Env(step(), step())
    running = harness(env)
    running.begin(SPEC, row_index=7, evaluation=True)
    seeds = [running.request().seed]
    running.advance(reply("a"))
    seeds.append(running.request().seed)
    assert seeds == [derive_seed(3, "train", 2, 5, "turn", k) for k in (0, 1)]
    assert env.resets == [{"seed": derive_seed(3, "train", 2, 5), "row_index": 7, "evaluation": True}]


@pytest.mark.parametrize(
    ("signature", "passed"),
    [
        (lambda self: ("a", {}), {}),
        (lambda self, seed=None: ("a", {"got": seed}), {"seed"}),
        (lambda self, *, row_index, evaluation=None: ("a", {"got": row_index}), {"row_index", "evaluation"}),
    ],
)
def test_reset_gets_only_what_it_takes(signature, passed):
    env = type("Some", (Env,), {"reset": signature})(step(terminated=True))
    running = harness(env)
    running.begin(SPEC, row_index=7)
    running.advance(reply("a"))
    expected = derive_seed(3, "train", 2, 5) if "seed" in passed else 7
    assert running.episode().info.get("got", expected) == expected


# Prompt "Go." has `len(PROMPT)` tokens and the frame of "More." `len(FRAME)`, its end token left out.
PROMPT = encode("<|im_start|>user\nGo.<|im_end|>\n<|im_start|>assistant\n")
FRAME = encode("\n<|im_start|>user\nMore.<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("case", "settings", "replies", "steps", "reasons", "terminated", "tail"),
    [
        ("environment terminates", {}, [reply("a")], [step(terminated=True)], ["eos"], True, "reply"),
        ("environment truncates", {}, [reply("a")], [step(truncated=True)], ["eos"], False, "reply"),
        ("both flags: terminated", {}, [reply("a")], [step(terminated=True, truncated=True)], ["eos"], True, "reply"),
        ("last turn", {"max_turns": 1}, [reply("a")], [step()], ["eos"], False, "reply"),
        ("length, then eos", {"max_turns": 2, "max_output_tokens": 2}, [reply("ab", end=False), reply("a")], [step(), step()], ["length", "eos"], False, "reply"),
        ("length, scored as final", {"max_output_tokens": 2}, [reply("ab", end=False)], [step(terminated=True)], ["length"], True, "reply"),
        ("context cut", {"max_model_len": len(PROMPT) + 2}, [reply("ab", end=False)], [step()], ["context"], False, "reply"),
        ("context cut below max_output_tokens", {"max_model_len": len(PROMPT) + 2, "max_output_tokens": 3}, [reply("ab", end=False)], [step()], ["context"], False, "reply"),
        ("no room for the feedback", {"max_model_len": len(PROMPT) + 2 + len(FRAME)}, [reply("a")], [step()], ["eos"], False, "reply"),
        ("stop string", {"max_turns": 1}, [reply("a", end=False, stop_reason=StopReason.STOP)], [step()], ["stop"], False, "reply"),
        ("kept observation", {"max_turns": 1, "keep_final_observation": True}, [reply("a")], [step()], ["eos"], False, "feedback"),
        ("kept observation that just fits", {"max_model_len": len(PROMPT) + 2 + len(FRAME), "keep_final_observation": True}, [reply("a")], [step()], ["eos"], False, "feedback"),
        ("kept observation that doesn't fit", {"max_model_len": len(PROMPT) + 1 + len(FRAME), "keep_final_observation": True}, [reply("a")], [step()], ["eos"], False, "reply"),
        ("nothing kept after a true end", {"keep_final_observation": True}, [reply("a")], [step(terminated=True)], ["eos"], True, "reply"),
    ],
)  # fmt: skip
def test_how_episodes_end(case, settings, replies, steps, reasons, terminated, tail):
    episode = play(Env(*steps), *replies, **settings)
    assert [turn.stop_reason.value for turn in episode.turns] == reasons
    assert (episode.terminated, episode.truncated) == (terminated, not terminated)
    beyond = episode.token_ids[episode.turns[-1].end :]
    assert beyond.tolist() == (FRAME if tail == "feedback" else [])
    assert not episode.action_mask[episode.turns[-1].end :].any()


def test_one_more_token_of_room_goes_on():
    running = harness(
        Env(step(), step()), max_model_len=len(PROMPT) + 2 + len(FRAME) + 1, max_output_tokens=9
    )
    running.begin(SPEC)
    assert running.request().max_new_tokens == 9
    running.advance(reply("a"))
    assert running.request().max_new_tokens == 1
    running.advance(reply("b", end=False))
    assert running.request() is None
    assert running.episode().turns[1].stop_reason is StopReason.CONTEXT


def test_a_cut_reply_is_closed_by_the_frame_and_masked_out():
    episode = play(Env(step(), step()), reply("ab", end=False), reply("c"), max_turns=2, max_output_tokens=2)
    assert TOKENIZER.decode(episode.token_ids[episode.action_mask]) == "abc<|im_end|>"
    first = episode.turns[0]
    assert episode.token_ids[first.end] == END
    assert not episode.action_mask[first.end]


def test_a_reply_without_tokens_is_a_turn_without_tokens():
    empty = Generation(token_ids=[], logprobs=np.zeros(0, np.float32), stop_reason=StopReason.STOP)
    env = Env(step(reward=-1.0), step(reward=2.0))
    episode = play(env, empty, reply("b"), max_turns=2)
    assert env.seen == ["", "b"]
    assert [turn.end - turn.start for turn in episode.turns] == [0, 2]
    assert episode.episode_return == 1.0
    assert episode.num_action_tokens == 2


@pytest.mark.parametrize("room", [0, -3])
def test_a_prompt_without_room_is_an_episode_without_turns(room):
    episode = play(Env(), max_model_len=len(PROMPT) + room)
    assert (episode.turns, episode.truncated, episode.success) == ((), True, False)
    assert episode.token_ids.tolist() == PROMPT


def test_length_settings_reach_the_request():
    running = harness(Env(), max_output_tokens=3, min_output_tokens=2)
    running.begin(SPEC)
    assert (running.request().max_new_tokens, running.request().min_new_tokens) == (3, 2)
    running = harness(Env(), max_model_len=len(PROMPT) + 1, min_output_tokens=2)
    running.begin(SPEC)
    assert (running.request().max_new_tokens, running.request().min_new_tokens) == (1, 1)


@pytest.mark.parametrize(
    ("info", "reward", "success"),
    [
        ({"success": True}, 0.0, True),
        ({"correct": np.bool_(False)}, 5.0, False),
        ({"success": False, "correct": True}, 5.0, False),
        ({}, 0.75, True),
        ({}, 0.5, False),
    ],
)
def test_success_is_the_environments_word_or_the_threshold(info, reward, success):
    episode = play(Env(step(reward=reward, terminated=True, **info)), reply("a"), success_threshold=0.75)
    assert episode.success is success


def test_rewards_have_the_precision_of_the_files():
    episode = play(Env(step(reward=0.1, terminated=True)), reply("a"))
    assert episode.turns[0].reward == float(np.float32(0.1)) != 0.1


def test_chat_messages_and_the_system_prompt_stand_at_the_start():
    messages = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2?"},
    ]
    env = Env(step(), step(terminated=True), observation=messages)
    episode = play(env, reply("4"), reply("5"), system_prompt="Be brief.")
    text = TOKENIZER.decode(episode.token_ids)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?")
    assert text.count("Be brief.") == 1
    assert episode.turns[0].observation == "user: 1+1?\nassistant: 2\nuser: 2+2?"


def test_chat_messages_come_after_a_reply_too():
    answer = [{"role": "tool", "content": "4", "name": "sum"}, {"role": "user", "content": "And?"}]
    episode = play(Env(step(observation=answer), step(terminated=True)), reply("a"), reply("b"))
    text = "a<|im_end|>\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\nb"
    assert text in TOKENIZER.decode(episode.token_ids)
    assert episode.turns[1].observation == "tool: 4\nuser: And?"


def test_episodes_without_a_task_id_are_named_by_their_content():
    ids = [play(Env(step(terminated=True), observation=text), reply("a")).task_id for text in ("x", "x", "y")]
    assert ids[0] == ids[1] != ids[2]


def test_info_becomes_json():
    info = {"score": np.float32(0.5), "grid": np.arange(3), 4: (None, float("nan")), "invalid": True}
    episode = play(Env(step(terminated=True, **{"note": "x"}), info=info), reply("a"))
    assert json.loads(json.dumps(episode.info)) == {
        "score": 0.5,
        "grid": [0, 1, 2],
        "4": [None, None],
        "note": "x",
    }


class Closed(Exception):
    pass


def raising(self, action):
    raise Closed("connection lost")


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (step(reward=float("nan")), "reward of nan"),
        (step(reward=1e300), r"reward of 1e\+300"),
        (step(reward="1"), "'1' as reward"),
        (step(reward=None), "None as reward"),
        (step(observation=None), "None as observation"),
        (step(observation="\ud800"), "valid Unicode"),
        (step(observation=[]), "step returned an empty list as observation"),
        (step(observation=[{"role": "tool"}]), "message 0 of step's observation"),
        (step(observation=[{"role": "tool", "content": "a", "id": "b"}]), "message 0 of step's observation"),
        (step(observation=[{"role": "assistant", "content": "a"}]), "an assistant message"),
        (step(terminated=1), "1 as `terminated`"),
        (("More.", 0.0, True, {}), "a tuple of 4"),
        (("More.", 0.0, True, False, None), "None as info"),
        (step(invalid="yes"), r"info\['invalid'\] is 'yes'"),
    ],
)
def test_a_faulty_step_names_environment_and_episode(result, message):
    running = harness(Env(result))
    running.begin(SPEC)
    with pytest.raises(EnvironmentFault, match=rf"test_harness\.Env, episode train-0002-00005: .*{message}"):
        running.advance(reply("a"))


@pytest.mark.parametrize(
    ("reset", "message"),
    [
        (lambda self: "Go.", r"reset returned a str; it returns \(observation, info\)"),
        (lambda self: (["Go."], {}), "message 0 .* is 'Go.'"),
        (lambda self: ([], {}), "an empty list as observation"),
        (lambda self: (3, {}), "a int as observation"),
        (lambda self: ("Go.", {"state": object()}), r"info\['state'\] is a object"),
    ],
)
def test_a_faulty_reset_names_environment_and_episode(reset, message):
    env = type("Bad", (Env,), {"reset": reset})(step(terminated=True))
    with pytest.raises(EnvironmentFault, match=rf"Bad, episode train-0002-00005: .*{message}"):
        play(env, reply("a"))


def test_an_exception_of_the_environment_keeps_its_cause():
    running = harness(type("Remote", (Env,), {"step": raising})())
    running.begin(SPEC)
    with pytest.raises(EnvironmentFault, match="step raised Closed: connection lost") as fault:
        running.advance(reply("a"))
    assert isinstance(fault.value.__cause__, Closed)


def test_misuse_is_refused():
    running = harness(Env(step()))
    with pytest.raises(TrajectoryError, match="begin"):
        running.request()
    running.begin(SPEC)
    with pytest.raises(TrajectoryError, match="isn't over"):
        running.episode()
    short = Generation(token_ids=[1, 2], logprobs=np.zeros(1, np.float32), stop_reason=StopReason.EOS)
    with pytest.raises(TrajectoryError, match="2 tokens and 1 log-probs"):
        running.advance(short)
    with pytest.raises(TemplateError, match="system_prompt needs"):
        RolloutHarness.local(Env(), TOKENIZER, apply_chat_template=False, system_prompt="s")
    blank = RolloutHarness.local(Env(observation=""), TOKENIZER, apply_chat_template=False)
    with pytest.raises(TemplateError, match="no tokens"):
        blank.begin(SPEC)


def test_a_harness_starts_over():
    running = harness(Env(step(terminated=True), step(terminated=True)), max_turns=1)
    episodes = []
    for index in (0, 1):
        running.begin(EpisodeSpec(seed=0, split="train", iteration=0, index=index))
        running.advance(reply("a"))
        episodes.append(running.episode())
    assert [episode.spec.index for episode in episodes] == [0, 1]
    assert episodes[0].token_ids.tolist() == episodes[1].token_ids.tolist()


def test_rows_cover_the_dataset_once_an_epoch():
    rows = [row_for(0, "train", n, 7) for n in range(21)]
    epochs = [rows[start : start + 7] for start in (0, 7, 14)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert rows != [row_for(1, "train", n, 7) for n in range(21)]


def test_the_dataset_size_is_forwarded():
    env = Env()
    assert harness(env).dataset_size is None
    env.dataset_size = 12
    assert harness(env).dataset_size == 12
    env.dataset_size = 0
    with pytest.raises(EnvironmentFault, match="dataset_size is 0"):
        _ = harness(env).dataset_size


class RowsEnv(CountdownEnv):
    def __init__(self, train_path, *, eval_path=None, turns=1):
        super().__init__(turns)
        self.train_path, self.eval_path = train_path, eval_path


ROWS = f"{__name__}:RowsEnv"


def test_environments_come_from_the_config(tmp_path):
    config = EnvConfig(factory="llmppo.testing:CountdownEnv", kwargs={"turns": 2})
    assert make_env(config).turns == 2
    with pytest.raises(ConfigError, match=r"env\.kwargs: .*'steps'.*takes \(turns: int = 4\)"):
        make_env(EnvConfig(factory="llmppo.testing:CountdownEnv", kwargs={"steps": 2}))
    with pytest.raises(ConfigError, match=r"env\.factory"):
        make_env(EnvConfig(factory="llmppo.testing:Countdown"))


def test_dataset_paths_go_to_factories_that_take_them(tmp_path):
    with pytest.raises(ConfigError, match="add a `dataset` section"):
        make_env(EnvConfig(factory=ROWS))
    with pytest.raises(ArtefactError, match=r"train\.jsonl does not exist"):
        make_env(EnvConfig(factory=ROWS), tmp_path)
    for name in ("train.jsonl", "eval.jsonl"):
        (tmp_path / name).write_text("{}\n")
    env = make_env(EnvConfig(factory=ROWS, kwargs={"eval_path": "mine"}), tmp_path)
    assert (env.train_path, env.eval_path) == (tmp_path / "train.jsonl", "mine")
    assert make_env(EnvConfig(factory="llmppo.testing:CountdownEnv"), tmp_path).turns == 4


def broken(cause):
    raise TypeError(cause)


def test_a_factory_that_raises_is_named():
    config = EnvConfig(factory=f"{__name__}:broken", kwargs={"cause": "no licence"})
    with pytest.raises(EnvironmentFault, match=r"env\.factory .*:broken raised TypeError: no licence"):
        make_env(config)


def test_harnesses_come_from_the_config():
    config = EnvConfig(factory="llmppo.testing:CountdownEnv", max_turns=3, success_threshold=2.0)
    sampling = SamplingConfig(max_model_len=200, max_output_tokens=7, min_output_tokens=2)
    make = harness_factory(config, sampling, TOKENIZER, keep_final_observation=True)
    first, second = make(), make()
    assert first.env is not second.env
    assert (first.max_turns, first.success_threshold, first.keep_final_observation) == (3, 2.0, True)
    assert (first.max_model_len, first.max_output_tokens, first.min_output_tokens) == (200, 7, 2)
