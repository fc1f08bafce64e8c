"""Datasets: pack, index, verify and card."""
