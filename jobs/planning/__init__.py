"""Computes what a recipe will cost."""
