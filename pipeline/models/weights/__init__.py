"""Our weights folder: its files, how its weights are used, and how they are fitted to another model."""
