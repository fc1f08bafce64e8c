"""Values of settings and columns: their types and ranges, and how two sets of them differ."""
