"""The trainer: `agent.LLMPPO` holds model, optimizer and counters; the modules beside it do the work."""
