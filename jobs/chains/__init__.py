"""Submits jobs, and chains of stages that run one after another."""
