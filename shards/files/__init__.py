"""Small files: JSON of a known type, lines of JSON, and seals that show whether a file is whole."""
