"""Holds the commands for datasets: pack, index, verify and card."""
