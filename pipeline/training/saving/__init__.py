"""What a run saves and when, its best checkpoint, its end, and whether a job may continue a run."""
