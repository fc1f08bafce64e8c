"""Training: engine, loop, schedule, optimiser, checkpoints, signals, metrics, ledger."""
