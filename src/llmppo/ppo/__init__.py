"""PPO as pure tensor functions: no model, no file.

Axes: `B` episodes, `N` action tokens of the longest episode (the compressed axis: observations and
prompts are left out), `K` turns, `U` units, which are tokens, turns or whole episodes.
"""
