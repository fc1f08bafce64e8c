"""Reads what a run directory says about its run, without loading torch."""
