"""The process beside each rank that writes checkpoints, and the rank's side of it."""
