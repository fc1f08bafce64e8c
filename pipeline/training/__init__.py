"""Training: engine, loop, schedule, optimiser, loss, checkpoints, signals, metrics, ledger."""
