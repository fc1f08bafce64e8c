"""The ranks of a run: their numbers, how they meet, their devices, and their collectives."""
