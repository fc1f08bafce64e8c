"""Turns existing tars into a dataset, in place."""
