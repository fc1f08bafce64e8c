"""Turns existing tars into a dataset without changing them."""
