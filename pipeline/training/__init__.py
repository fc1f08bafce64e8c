"""Training: engine, loop, schedule, optimiser, signals, metrics, ledger."""
