"""The checkpoint writer, a process beside each rank, and the rank's side of it."""
