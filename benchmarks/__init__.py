"""Benchmarks that users can repeat. Their results are kept beside them as data, with the command that made them."""
