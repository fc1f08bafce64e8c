"""When a run saves and what, its best checkpoint, its end, and whether it is the same run."""
