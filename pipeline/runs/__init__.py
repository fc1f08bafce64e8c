"""What a run directory says about its run, read without torch."""
