"""Patchline's command line: stages and their recipes, in one process each. No mathematics."""
