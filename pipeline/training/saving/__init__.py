"""The saves of a run, when they are due, the best checkpoint, the final weights, and which jobs may continue a run."""
