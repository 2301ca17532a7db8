"""Environments that hang, raise or leave their protocol: the episode pays, never the run, and timing never shows."""

import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from llmppo.config import EnvConfig, EnvironmentLimits
from llmppo.engines.hf import HFEngine, hf_forward
from llmppo.envs.harness import RolloutHarness
from llmppo.envs.pool import EnvironmentPool
from llmppo.envs.templates import end_token_ids
from llmppo.errors import ConfigError, EnvironmentFault, EnvironmentTimeout
from llmppo.testing import CountdownEnv, ScriptedEngine, tiny_model, tiny_tokenizer
from llmppo.trainer.batch import batch_from_episodes
from llmppo.trajectories.collect import collect_episodes, rollout_metrics
from llmppo.trajectories.episode import EpisodeSpec
from llmppo.trajectories.parquet import read_episodes, write_episodes

TOKENIZER = tiny_tokenizer()
ENDS = sorted(end_token_ids(TOKENIZER))
MODEL = tiny_model(seed=3)
FOREVER = threading.Event()  # never set


def limits(**settings):
    return EnvironmentLimits(**({"step_timeout_s": 5.0, "retries": 0, "max_failed_frac": 0.5} | settings))


class Trouble(CountdownEnv):
    """Episode `number` of three turns does `what(self, number)` in its second step."""

    def __init__(self, number, what):
        super().__init__(3)
        self.number, self.what = number, what

    def step(self, action):
        answer = super().step(action)
        return (self.what(self, self.number) or answer) if self.left == 1 else answer


def collect(what, n=4, *, engine=None, make=None, **settings):
    numbers = iter(range(100))

    def fresh():
        env = Trouble(next(numbers), what)
        return RolloutHarness.local(env, TOKENIZER, max_turns=3, max_output_tokens=6)

    specs = [EpisodeSpec(seed=5, split="train", iteration=1, index=index) for index in range(n)]
    return collect_episodes(make or fresh, engine or digits(), specs, limits=limits(**settings))


def digits():
    return ScriptedEngine(lambda request: [TOKENIZER.encode("7")[0], ENDS[0]], ENDS)


def sampler():
    return HFEngine(hf_forward(MODEL), ENDS, logit_bias={ENDS[0]: 4.0})


def raises(env, number):
    if number == 2:
        raise OSError("connection lost")


def exits(env, number):
    if number == 2:
        raise SystemExit(3)


def hangs(env, number):
    if number == 2:
        FOREVER.wait()


def talks_nonsense(env, number):
    return ("ok", "a lot", False, False, {}) if number == 2 else None


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (raises, "step raised OSError: connection lost"),
        (exits, "step raised SystemExit: 3"),
        (hangs, r"step took longer than env\.step_timeout_s, 1 s"),
        (talks_nonsense, "step returned 'a lot' as reward"),
    ],
)
def test_a_failed_episode_is_marked_and_counted_and_left_out(what, message, tmp_path):
    episodes = collect(what, step_timeout_s=1.0)  # a busy machine may take its time over a healthy step
    assert [episode.failure is None for episode in episodes] == [True, True, False, True]
    failed = episodes[2]
    assert failed.failure.startswith(f"{__name__}.Trouble, episode train-0001-00002: ")
    assert re.search(message, failed.failure)
    assert [turn.reward for turn in failed.turns] == [1.0]  # as far as it came
    assert (failed.terminated, failed.truncated, failed.success) == (False, True, False)
    metrics = rollout_metrics(episodes)
    assert (metrics["rollout/episodes"], metrics["rollout/failed_episodes"]) == (3, 1)
    assert metrics["rollout/reward_mean"] == 3.0
    write_episodes(tmp_path / "a", episodes, {})
    batch = batch_from_episodes(read_episodes(tmp_path / "a"), 3)
    assert batch.episode_ids == ["train-0001-00000", "train-0001-00001", "train-0001-00003"]


def test_a_reset_that_fails_is_an_episode_without_tokens(tmp_path):
    class Closed(CountdownEnv):
        def reset(self, seed=None):
            if seed_of[0] == seed:
                raise OSError("no server")
            return super().reset(seed)

    from llmppo.seeding import derive_seed

    seed_of = [derive_seed(5, "train", 1, 0)]

    def make():
        return RolloutHarness.local(Closed(2), TOKENIZER, max_turns=2)

    episodes = collect(None, 2, make=make)
    assert "reset raised OSError: no server" in episodes[0].failure
    assert (len(episodes[0].token_ids), episodes[0].turns) == (0, ())
    write_episodes(tmp_path / "a", episodes, {})
    assert read_episodes(tmp_path / "a")[0].failure == episodes[0].failure


def test_info_that_cannot_be_stored_fails_its_episode():
    def unstorable(env, number):
        return ("x", 0.0, True, False, {"state": object()}) if number == 1 else None

    assert "info['state'] is a object" in collect(unstorable)[1].failure


@pytest.mark.parametrize("what", ["raise", "hang"])
def test_a_retry_leaves_no_trace(what):
    """The environment of the first attempt fails in turn two; the second attempt gets the recorded reply again."""

    def once(env, number):
        if number == 2:
            if what == "hang":
                FOREVER.wait()
            raise OSError("connection lost")

    undisturbed = collect(lambda env, number: None, engine=sampler())
    recovered = collect(once, engine=sampler(), retries=1, step_timeout_s=0.3)
    for first, second in zip(undisturbed, recovered, strict=True):
        assert first.token_ids.tolist() == second.token_ids.tolist()
        assert first.sampling_logprobs.tolist() == second.sampling_logprobs.tolist()
        assert (first.turns, second.failure) == (second.turns, None)


def test_an_environment_that_does_not_repeat_itself_fails_its_retry():
    class Moody(Trouble):
        def reset(self, seed=None):
            return f"{self.number} says hello", {}

    numbers = iter(range(100))

    def make():
        return RolloutHarness.local(Moody(next(numbers), raises), TOKENIZER, max_turns=3)

    (failed,) = [episode for episode in collect(None, make=make, retries=1) if episode.failure]
    assert "a retry gave another text after 0 replies" in failed.failure


def test_above_the_share_the_commonest_failures_are_told():
    def two_ways(env, number):
        raise OSError("disk full") if number else ValueError("bad word")

    with pytest.raises(EnvironmentFault) as fault:
        collect(two_ways, 4, max_failed_frac=0.5, concurrency=1)
    text = str(fault.value)
    assert text.startswith(
        "the environments of at least 3 of 4 episodes failed, env.max_failed_frac allows a share of 0.5"
    )
    assert text.index("2 x") < text.index("disk full") < text.index("1 x") < text.index("bad word")
    assert "episode train-0001-00001: step raised OSError" in text
    assert "env.step_timeout_s" in text
    with pytest.raises(EnvironmentFault, match="of at least 1 of 1 episodes"):
        collect(two_ways, 1, max_failed_frac=1.0)


def test_other_errors_stop_the_run():
    def misconfigured(env, number):
        raise ConfigError("env.kwargs: no such word list")

    with pytest.raises(ConfigError, match="no such word list"):
        collect(misconfigured, max_failed_frac=1.0)


def test_a_close_that_raises_warns_and_keeps_the_episode():
    class Stuck(CountdownEnv):
        def close(self):
            raise OSError("still busy")

    def make():
        return RolloutHarness.local(Stuck(1), TOKENIZER)

    with pytest.warns(UserWarning, match="close raised OSError: still busy"):
        episodes = collect(None, 1, make=make)
    assert episodes[0].failure is None


class Slow(CountdownEnv):
    """Takes up to 20 ms for each call, another time in every run."""

    def reset(self, seed=None):
        time.sleep(random.SystemRandom().random() / 50)
        return super().reset(seed)

    def step(self, action):
        time.sleep(random.SystemRandom().random() / 50)
        return super().step(action)


@pytest.mark.parametrize("waves", [1, 3])
def test_timing_never_shows_in_the_files(waves, tmp_path):
    def make(kind):
        return lambda: RolloutHarness.local(kind(3), TOKENIZER, max_turns=3, max_output_tokens=6)

    runs = [(Slow, 8), (Slow, 3), (CountdownEnv, 8), (CountdownEnv, 1)]
    for name, (kind, concurrency) in enumerate(runs):
        settings = {"waves": waves, "concurrency": concurrency}
        episodes = collect(None, 8, make=make(kind), engine=sampler(), **settings)
        write_episodes(tmp_path / str(name), episodes, {})
    first, *others = [(tmp_path / str(name)).read_bytes() for name in range(len(runs))]
    assert all(other == first for other in others)


def test_a_slow_episode_holds_up_its_own_wave_only():
    """Episode 0 answers its first reply only after episodes 1 and 3, of the other wave, are over."""
    over = []

    class Waiting(CountdownEnv):
        def __init__(self, number):
            super().__init__(3)
            self.number = number

        def step(self, action):
            if self.number == 0 and self.left == 3:
                assert others_over.wait(10)
            answer = super().step(action)
            if answer[2]:
                over.append(self.number)
                if {1, 3} <= set(over):
                    others_over.set()
            return answer

    others_over, numbers = threading.Event(), iter(range(4))

    def make():
        return RolloutHarness.local(Waiting(next(numbers)), TOKENIZER, max_turns=3, max_output_tokens=6)

    episodes = collect(None, make=make, waves=2, step_timeout_s=None, concurrency=4)
    assert [episode.failure for episode in episodes] == [None] * 4
    assert set(over[:2]) == {1, 3}


def test_draws_from_the_global_generator_are_warned_of():
    def draws(env, number):
        random.random()

    with pytest.warns(UserWarning, match="global random state"):
        collect(draws)
    collect(draws, concurrency=1)  # one after the other: no warning


def test_environments_that_share_state_run_alone():
    threads, most = [0], [0]

    class Shared(CountdownEnv):
        concurrent = False

        def step(self, action):
            threads[0] += 1
            most[0] = max(most[0], threads[0])
            time.sleep(0.005)
            threads[0] -= 1
            return super().step(action)

    collect(None, make=lambda: RolloutHarness.local(Shared(2), TOKENIZER, max_turns=2))
    assert most == [1]


def test_without_limit_and_company_calls_run_in_the_callers_thread():
    seen = set()
    collect(lambda env, number: seen.add(threading.current_thread()), step_timeout_s=None, concurrency=1)
    assert seen == {threading.main_thread()}


def test_a_pool_replaces_the_threads_of_late_calls():
    with EnvironmentPool(2, 0.1) as pool:
        for number in range(4):
            pool.submit(number, f"call {number}", FOREVER.wait)
        pool.submit("last", "call last", lambda: "done")
        outcomes = {}
        while pool.busy:
            outcomes |= dict(pool.wait())
    assert outcomes["last"] == "done"
    assert all(isinstance(outcomes[number], EnvironmentTimeout) for number in range(4))
    assert str(outcomes[3]) == "call 3 took longer than env.step_timeout_s, 0.1 s"


def test_a_call_that_ended_late_is_late():
    """Also where nobody looked at the clock while it ran."""
    with EnvironmentPool(1, 0.05) as pool:
        pool.submit(0, "call", lambda: time.sleep(0.15))
        time.sleep(0.3)
        ((_, outcome),) = pool.wait()
    assert isinstance(outcome, EnvironmentTimeout)


def test_a_hanging_environment_does_not_keep_the_process_alive():
    code = (
        "import threading\n"
        "from llmppo.envs.pool import EnvironmentPool\n"
        "with EnvironmentPool(2, 0.1) as pool:\n"
        "    pool.submit(0, 'call', threading.Event().wait)\n"
        "    print(pool.wait())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "EnvironmentTimeout" in done.stdout) == (0, True), done.stderr


def test_a_crash_of_native_code_tells_the_line(tmp_path: Path) -> None:
    (tmp_path / "crashing.py").write_text(
        "import ctypes\nclass Game:\n    def reset(self): ...\n    def step(self, action): ...\n"
        "    def references(self):\n        return ctypes.string_at(0)\n"
    )
    settings = {"env": EnvConfig(factory="crashing:Game").model_dump(mode="json"), "dataset_present": False}
    command = [
        str(Path(sys.executable).with_name("llmppo")), "baselines", "--settings", json.dumps(settings),
        "--out", "baselines.json", "--log", "baselines.log",
    ]  # fmt: skip
    ended = subprocess.run(command, cwd=tmp_path, check=False)
    assert ended.returncode == -signal.SIGSEGV
    assert 'crashing.py", line 6 in references' in (tmp_path / "baselines.log").read_text()
