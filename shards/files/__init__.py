"""Reads and writes local files, and JSON of declared types."""
