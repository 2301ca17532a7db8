"""Tiny models, a byte-level tokenizer and scripted counterparts that tests and newcomers share.

Everything is built in memory from a seed: no download, no file. Random numbers drawn here leave the
process's own generators as they were.
"""

from llmppo.testing.models import CHATML, tiny_model, tiny_tokenizer
from llmppo.testing.rollouts import CountdownEnv, ScriptedEngine

__all__ = ["CHATML", "CountdownEnv", "ScriptedEngine", "tiny_model", "tiny_tokenizer"]
