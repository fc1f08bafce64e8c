"""Works with Slurm: settings, the batch script, limits, checks before a job is submitted, and the queue."""
