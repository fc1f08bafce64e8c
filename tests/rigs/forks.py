"""What the server of forks has loaded, of which a test run has one: whoever forks first starts it for all."""

_STAGES = ("pack", "verify", "pretrain", "finetune", "evaluate", "demo")
PRELOADED = ["jobs.cli", *(f"jobs.{stage}" for stage in _STAGES), "tests.rigs.processes"]
