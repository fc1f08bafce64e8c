"""What rank 0 writes about a run: metrics, norms, the time ledger, and loggers."""
