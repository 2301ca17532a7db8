"""Work, time and memory of a learn step, of generation and of an iteration, beside the closest peer (AgileRL's `LLMPPO`).

    python benchmarks/learn_step.py run SERIES FILE --model BASE [--peer PEER/bin/python] [--rounds 5]
    python benchmarks/learn_step.py table FILE

BASE is a model folder (as in `results/shared/base_model`), PEER an environment with agilerl. The sides of a series (see `SERIES`) each
load the model in a process of their own and then take turns, so that other work on the machine meets all of them. `run`
adds to FILE, in which `table` compares the medians. A learn step has synthetic rows of which the first half is prompt.
"""

import argparse
import contextlib
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROWS, TOKENS, PROMPTS, NEW_TOKENS, EPISODES, TURNS = 8, 256, 8, 64, 64, 4
PEER_MICRO = 4  # its backward passes; with all 8 rows it takes twice the memory and no less time

# Each side: what it does, and the settings in which it differs from its library's defaults.
OURS, PEER = {"library": "ours"}, {"library": "peer"}
SERIES: dict[str, dict[str, dict[str, Any]]] = {
    "kl": {
        "ours": OURS,
        "ours, recomputing": {**OURS, "gradient_checkpointing": True},
        "peer": PEER,
        "peer, keeping activations": {**PEER, "gradient_checkpointing": False},
    },
    "beta0": {
        "ours": {**OURS, "beta": 0.0},
        "peer": {**PEER, "beta": 0.0},
        "peer, keeping activations": {**PEER, "beta": 0.0, "gradient_checkpointing": False},
    },
    "prefix": {
        "shared": {**OURS, "top_layers": 8},
        "not shared": {**OURS, "top_layers": 8, "share": False},
    },
    "memory": {
        "defaults": OURS,
        "gradient_checkpointing": {**OURS, "gradient_checkpointing": True},
        "micro_batch_size_per_gpu: 2": {**OURS, "micro_batch_size_per_gpu": 2},
        "both": {**OURS, "gradient_checkpointing": True, "micro_batch_size_per_gpu": 2},
        "use_liger_loss": {**OURS, "use_liger_loss": True},
        "quantization, 4 bits": {**OURS, "quantization_config": {"bits": 4}},
        "quantization, 8 bits": {**OURS, "quantization_config": {"bits": 8}},
    },
    "rows": {str(rows): {**OURS, "rows": rows, "tokens": 128} for rows in (8, 16, 32)},
    "generation": {name: {**side, "task": "generate"} for name, side in (("ours", OURS), ("peer", PEER))},
    "iteration": {name: {**side, "task": "iterate"} for name, side in (("ours", OURS), ("peer", PEER))},
}
# What is compared: series, first side, second side, measure, the most that the ratio should be.
RATIOS = (
    ("kl", "ours", "peer", "wall_s", 0.50),
    ("kl", "ours", "peer, keeping activations", "wall_s", 0.65),
    ("kl", "ours, recomputing", "peer", "memory_mb", 0.35),
    ("beta0", "ours", "peer", "wall_s", 0.42),
    ("beta0", "ours", "peer, keeping activations", "wall_s", 0.55),
    ("prefix", "shared", "not shared", "wall_s", 0.50),
    ("rows", "16", "8", "wall_s_per_row", 1.10),
    ("rows", "32", "16", "wall_s_per_row", 1.10),
    ("generation", "ours", "peer", "wall_s", 0.25),
    ("iteration", "ours", "peer", "cpu_s", 0.20),
)


# -- the processes of the two sides -------------------------------------------------------------------


def serve(side: dict[str, Any], model: str) -> None:
    """Load `model`, then do the side's task at every line of standard input, and print what it took."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    settings = {
        name: value
        for name, value in side.items()
        if name not in ("library", "task", "share", "rows", "tokens")
    }
    rows = side.get("rows", ROWS)
    load = {"ours": load_ours, "peer": load_peer}[side["library"]]
    agent, decoder, iterate = load(model, rows, settings, side.get("task", "learn"))
    if side.get("share") is False:
        agent.model.first_adapted = 0
    vocabulary = decoder.embed_tokens.weight.shape[0]
    if side.get("task") == "iterate":
        task = iterate
    elif side.get("task") == "generate":
        prompts = prompt_rows(vocabulary)
        task = lambda: agent.get_action(prompts, training=True)  # noqa: E731
    else:
        experiences, turn_ids = synthetic(rows, side.get("tokens", TOKENS), vocabulary)
        task = lambda: agent.learn(experiences, turn_ids=turn_ids)  # noqa: E731
    passes = count_passes(agent, decoder, rows) if "task" not in side else {}
    give_memory_back()
    print(json.dumps(passes), file=answers, flush=True)
    for _ in sys.stdin:
        print(json.dumps(measured(task)), file=answers, flush=True)


def measured(task: Any) -> dict[str, float]:
    """Seconds of a call, and its peak of resident memory over what was resident before."""
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = resident("VmRSS")
    wall, cpu = time.perf_counter(), time.process_time()
    task()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    found = {"wall_s": wall, "cpu_s": cpu, "memory_mb": resident("VmHWM") - before}
    give_memory_back()
    return found


def give_memory_back() -> None:
    """So that a side's peak starts from the loaded model, and the others have room."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def resident(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def synthetic(rows: int, tokens: int, vocabulary: int) -> tuple[tuple[list[Any], list[Any], Any], Any]:
    """Experiences and turn ids of `rows` episodes of one turn, the second half of the tokens sampled."""
    import torch

    noise = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, vocabulary, (1, tokens), generator=noise) for _ in range(rows)]
    mask = (torch.arange(1, tokens) >= tokens // 2)[None]
    rewards = torch.randn(rows, 1, generator=noise)
    return (ids, [mask] * rows, rewards), torch.where(mask, 0, -1).repeat(rows, 1)


def prompt_rows(vocabulary: int) -> list[dict[str, Any]]:
    import torch

    noise = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, vocabulary, (1, NEW_TOKENS), generator=noise) for _ in range(PROMPTS)]
    return [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids]


def count_passes(agent: Any, decoder: Any, rows: int) -> dict[str, float]:
    """Token-forwards and -backwards through a layer for each token of a row, and head rows for each action token.

    Counted on short rows, in a learn step that warms up; mean of all layers. A recomputed layer counts again.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    counts: Counter[str] = Counter()
    vocabulary = decoder.embed_tokens.weight.shape[0]

    class HeadRows(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = function(*args, **(kwargs or {}))
            if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                counts["head"] += result.shape[0] * (result.shape[-1] == vocabulary)
            return result

    def passed(module: Any, inputs: Any, output: Any) -> None:
        counts["forward"] += output.shape[0] * output.shape[1]
        if output.requires_grad:
            output.register_hook(lambda g: counts.update(backward=g.shape[0] * g.shape[1]))

    # The norm before the MLP: it runs again when its layer is recomputed, and gradients reach it in every adapted layer.
    hooks = [layer.post_attention_layernorm.register_forward_hook(passed) for layer in decoder.layers]
    tokens = 16
    experiences, turn_ids = synthetic(rows, tokens, vocabulary)
    with HeadRows():
        agent.learn(experiences, turn_ids=turn_ids)
    for hook in hooks:
        hook.remove()
    through = len(decoder.layers) * rows * tokens
    return {
        "forwards": counts["forward"] / through,
        "backwards": counts["backward"] / through,
        "head_rows": counts["head"] / int((turn_ids >= 0).sum()),
    }


def game_settings() -> dict[str, Any]:
    """An iteration of the guessing game, the same for both libraries."""
    return {
        "batch_size": EPISODES, "mini_batch_size": 16, "micro_batch_size_per_gpu": 16, "lr_actor": 1e-3,
        "lr_critic": 1e-3, "beta": 0.01, "top_k": 0, "max_output_tokens": 8, "max_model_len": 512,
        "advantage_granularity": "turn", "gradient_checkpointing": False,
    }  # fmt: skip


def reply_length() -> dict[str, int]:
    return {
        "max_output_tokens": NEW_TOKENS,
        "min_output_tokens": NEW_TOKENS,
        "hf_generate_chunk_size": PROMPTS,
    }


def load_ours(model: str, rows: int, settings: dict[str, Any], task: str) -> tuple[Any, Any, Any]:
    from transformers import AutoTokenizer

    from llmppo import LLMPPO
    from llmppo.config import LoraSection
    from llmppo.envs.guess_number import GuessNumber
    from llmppo.envs.harness import RolloutHarness
    from llmppo.trainer.batch import batch_from_episodes
    from llmppo.trajectories.collect import collect_episodes
    from llmppo.trajectories.episode import EpisodeSpec

    tokenizer = AutoTokenizer.from_pretrained(model)
    extra = {"learn": {}, "generate": reply_length(), "iterate": game_settings()}[task]
    agent = LLMPPO(
        model_name=model,
        lora_config=LoraSection(top_layers=settings.pop("top_layers", None)),
        max_turns=TURNS if task == "iterate" else 1,
        **({"batch_size": rows} | extra | settings),
    )
    agent.listen_for_end_of(tokenizer)

    def make() -> RolloutHarness:
        return RolloutHarness.local(
            GuessNumber(), tokenizer, max_turns=TURNS, max_model_len=512, max_output_tokens=8
        )

    def iterate() -> None:
        specs = [
            EpisodeSpec(seed=0, split="train", iteration=agent.learn_steps, index=number)
            for number in range(EPISODES)
        ]
        agent.learn(batch_from_episodes(collect_episodes(make, agent.engine, specs), TURNS))

    return agent, agent.model.decoder, iterate


def load_peer(model: str, rows: int, settings: dict[str, Any], task: str) -> tuple[Any, Any, Any]:
    import logging
    import warnings

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    import torch
    from agilerl.algorithms import LLMPPO
    from agilerl.llm_envs import RolloutCollector, RolloutHarness
    from agilerl.rollouts.on_policy import collate_llm_rollouts, collect_rollouts_llm
    from agilerl.utils.ppo_value_head import AutoModelForCausalLMWithValueHead
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from llmppo.envs.guess_number import GuessNumber

    class Game(GuessNumber):
        def reset(self, seed: int | None = None, **_: object):  # type: ignore[no-untyped-def, override]
            return super().reset(seed)

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    base._agilerl_liger_patched = True  # its Triton kernels crash on a CPU
    extra = {
        "learn": {"mini_batch_size": rows, "micro_batch_size_per_gpu": PEER_MICRO},
        "generate": reply_length(),
        "iterate": {**game_settings(), "hf_generate_chunk_size": EPISODES},
    }[task]
    agent = LLMPPO(
        actor_network=AutoModelForCausalLMWithValueHead(base),
        pad_token_id=tokenizer.pad_token_id,
        pad_token=tokenizer.pad_token,
        device="cpu",
        use_liger_loss=False,
        **({"batch_size": rows} | extra | settings),
    )
    collector, group_seed = None, 1000

    def iterate() -> None:
        nonlocal collector, group_seed
        collector = collector or RolloutCollector(
            lambda: RolloutHarness.local(
                Game(), tokenizer, max_turns=TURNS, apply_chat_template=True, max_model_len=512
            ),
            EPISODES,
            1,
        )
        ids, masks, turn_ids, rewards, _, group_seed, logps, pixels = collect_rollouts_llm(
            agent=agent, env=collector, n_steps=TURNS, batch_size=EPISODES, group_seed=group_seed
        )
        batch = collate_llm_rollouts(
            ids, masks, turn_ids, rewards, logps, group_size=1, all_pixel_values=pixels
        )
        agent.learn(batch.experiences(), turn_ids=batch.turn_ids, sampling_logps=batch.sampling_logps)

    decoder = next(part for part in agent.actor.modules() if hasattr(part, "embed_tokens"))
    return agent, decoder, iterate


# -- measuring and comparing ------------------------------------------------------------------------


def run(options: argparse.Namespace) -> None:
    """Rounds of a series; within a round each side runs once, in an order that turns from round to round."""
    from llmppo.process import thread_environment

    found = json.loads(options.file.read_text()) if options.file.is_file() else {}
    seen = found.setdefault(options.series, {})
    sides = SERIES[options.series]
    if options.peer is None:
        sides = {name: side for name, side in sides.items() if side["library"] == "ours"}
    environment = {**os.environ, **thread_environment(options.threads), "HF_HUB_OFFLINE": "1"}
    with contextlib.ExitStack() as stack:
        workers = {}
        for name, side in sides.items():
            python = sys.executable if side["library"] == "ours" else options.peer
            command = [python, __file__, "serve", json.dumps(side), options.model]
            workers[name] = stack.enter_context(
                subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=environment)
            )
            seen.setdefault(name, {"passes": {}, "steps": []})["passes"] = answer(workers[name], name)
            if side.get("task"):
                ask(
                    workers[name], name
                )  # the first call is slower; a learn step has been warmed up by the count
        for number in range(options.rounds):
            names = list(workers)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                step = ask(workers[name], name)
                seen[name]["steps"].append(step)
                print(name, json.dumps(step), flush=True)
            options.file.write_text(json.dumps(found, indent=1))
        for worker in workers.values():
            worker.stdin.close()  # type: ignore[union-attr]


def ask(worker: Any, name: str) -> dict[str, float]:
    print("go", file=worker.stdin, flush=True)
    return answer(worker, name)


def answer(worker: Any, name: str) -> dict[str, float]:
    line = worker.stdout.readline()
    if not line:
        raise SystemExit(f"the process of side `{name}` ended; its messages stand above")
    return json.loads(line)


def table(options: argparse.Namespace) -> None:
    """Medians of every side, then the ratios, in Markdown."""
    found = json.loads(options.file.read_text())
    print(
        "| series | side | rounds | wall s | CPU s | peak MB | f | b | head rows |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    )
    for series, sides in found.items():
        for name, side in sides.items():
            middle = [
                statistics.median(step[key] for step in side["steps"])
                for key in ("wall_s", "cpu_s", "memory_mb")
            ]
            passes = " | ".join(
                f"{side['passes'][key]:.2f}" if side["passes"] else ""
                for key in ("forwards", "backwards", "head_rows")
            )
            print(
                f"| {series} | {name} | {len(side['steps'])} | {middle[0]:.2f} | {middle[1]:.2f} | {middle[2]:.0f} | {passes} |"
            )
    print("\n| series | of | to | measure | ratio | at most |\n| --- | --- | --- | --- | --- | --- |")
    for series, first, second, measure, bound in RATIOS:
        if {first, second} <= set(found.get(series, {})):
            ratio = median_ratio(
                found[series][first]["steps"],
                found[series][second]["steps"],
                measure,
                int(first) / int(second) if series == "rows" else 1.0,
            )
            print(f"| {series} | {first} | {second} | {measure} | {ratio:.3f} | {bound:.2f} |")


def median_ratio(
    first: list[dict[str, float]], second: list[dict[str, float]], measure: str, work: float
) -> float:
    """Median over rounds of first to second, for `work` times as much work."""
    key = measure.removesuffix("_per_row")
    return statistics.median(a[key] / b[key] / work for a, b in zip(first, second, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run", help="measure a series and add it to the file")
    runs.add_argument("series", choices=SERIES)
    runs.add_argument("file", type=Path)
    runs.add_argument("--model", required=True)
    runs.add_argument("--peer", help="Python of an environment with agilerl; left out, only ours is measured")
    runs.add_argument("--rounds", type=int, default=5)
    runs.add_argument("--threads", type=int, default=2)
    runs.set_defaults(run=run)
    serves = commands.add_parser("serve", help="one side, as `run` starts it")
    serves.add_argument("side", type=json.loads)
    serves.add_argument("model")
    serves.set_defaults(run=lambda options: serve(options.side, options.model))
    tables = commands.add_parser("table", help="compare what the file holds")
    tables.add_argument("file", type=Path)
    tables.set_defaults(run=table)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
