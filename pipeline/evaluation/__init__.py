"""Evaluation: scores over whole datasets."""
