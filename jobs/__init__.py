"""Patchline's command line: stages, their recipes, and commands that look after runs. There is no mathematics here."""
