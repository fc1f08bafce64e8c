"""Patchline's command line: stages, their recipes, and commands that look after runs. There is no mathematics here."""

DISTRIBUTION = "patchline"  # `patchline.refuse_others` looks for this line
