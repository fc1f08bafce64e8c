"""Verifies that a dataset is what its manifest says."""
