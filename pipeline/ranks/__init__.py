"""The ranks of a run: who they are, how they meet, their devices and their collectives."""
