"""Chooses the batch plan that fits into the memory of every rank."""
