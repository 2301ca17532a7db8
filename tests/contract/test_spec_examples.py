"""The two training examples of the user's documentation, with only imports and the model changed."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmppo import LLMPPO, RolloutHarness, save_llm_checkpoint, train_llm_rollout
from llmppo.testing.models import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizer()
    model = tiny_model(layers=1, hidden=16, max_positions=1024)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def agent_and_tokenizer(model_dir):
    model = AutoModelForCausalLM.from_pretrained(model_dir, torch_dtype=torch.bfloat16, device_map="auto")
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    agent = LLMPPO(
        actor_network=model,
        pad_token_id=tokenizer.eos_token_id,
        pad_token=tokenizer.eos_token,
        device="cuda" if torch.cuda.is_available() else "cpu",
        batch_size=8,
        update_epochs=1,
        clip_coef=0.2,
        max_output_tokens=128,
        max_model_len=1024,
    )
    return agent, tokenizer


def reward_fn(completion: str, answer: str, question: str) -> float:
    del question
    return float(answer.lower() in completion.lower())


class QADataset:
    """Single-turn dataset env: serve a question on reset, score it on step."""

    def __init__(self, questions, answers, reward_fn, prompt_builder, test_questions=None, test_answers=None):
        self.questions, self.answers = questions, answers
        self.test_questions, self.test_answers = test_questions, test_answers
        self.reward_fn, self.prompt_builder = reward_fn, prompt_builder
        self._cursor, self._split = 0, ""

    @property
    def dataset_size(self) -> int:
        return len(self.questions)

    def reset(self, seed=None, *, row_index=None, evaluation=None):
        if evaluation and self.test_questions is not None:
            qs, ans, split = self.test_questions, self.test_answers, "eval"
        else:
            qs, ans, split = self.questions, self.answers, "train"
        if row_index is None:
            if split != self._split:
                self._cursor, self._split = 0, split
            row_index, self._cursor = self._cursor, self._cursor + 1
        self._q, self._a = qs[row_index % len(qs)], ans[row_index % len(ans)]
        return self.prompt_builder(self._q), {}

    def step(self, action):
        return "", float(self.reward_fn(action, self._a, self._q)), True, False, {}


class ToyRolloutEnv:
    def reset(self, seed=None):
        del seed
        return "Start: What is 2+2?", {}

    def step(self, action: str):
        reward = 1.0 if "4" in action else 0.0
        return "Done.", reward, True, False, {"correct": bool(reward)}


@pytest.mark.slow
def test_single_turn_dataset(agent_and_tokenizer, tmp_path):
    agent, tokenizer = agent_and_tokenizer

    def env_factory():
        return RolloutHarness.local(
            QADataset(
                questions=["2+2?", "Capital of France?"],
                answers=["4", "Paris"],
                reward_fn=reward_fn,
                prompt_builder=lambda question: f"Q: {question}\nA:",
                test_questions=["3+3?"],
                test_answers=["6"],
            ),
            tokenizer,
            max_turns=1,
            pad_id=tokenizer.eos_token_id,
            apply_chat_template=True,
            max_model_len=1024,
        )

    trained_pop = train_llm_rollout(
        pop=[agent],
        max_turns=1,
        env_factory=env_factory,
        max_steps=2000,
        evaluation_interval=50,
    )
    assert trained_pop == [agent]
    assert agent.steps == 2000
    assert agent.learn_steps == 250
    assert len(agent.fitness) == 5
    assert {row["rollout/episodes"] for row in agent.history} == {8}

    save_llm_checkpoint(agent, tmp_path / "checkpoint")
    again = LLMPPO.load(tmp_path / "checkpoint", actor_network=tiny_model(layers=1, hidden=16).bfloat16())
    assert again.learn_steps == 250
    assert again.config == agent.config


@pytest.mark.slow
def test_multi_turn_environment(agent_and_tokenizer):
    agent, tokenizer = agent_and_tokenizer

    def env_factory():
        return RolloutHarness.local(
            ToyRolloutEnv(),
            tokenizer,
            max_turns=4,
            pad_id=tokenizer.eos_token_id,
            max_model_len=1024,
            max_output_tokens=128,
        )

    trained_pop = train_llm_rollout(
        pop=[agent],
        max_turns=4,
        env_factory=env_factory,
        max_steps=2000,
        evaluation_interval=50,
    )
    (agent,) = trained_pop
    assert agent.steps >= 2000
    assert agent.config.granularity(4) == "turn"
    rewards = [row["rollout/reward_mean"] for row in agent.history]
    assert all(row["rollout/success_rate"] == row["rollout/reward_mean"] for row in agent.history)
    assert any(reward > 0 for reward in rewards)
