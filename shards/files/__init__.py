"""Local files, and JSON of known types."""
