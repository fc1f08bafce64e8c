"""Submitting jobs, and stages that run one after another."""
