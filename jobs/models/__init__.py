"""Holds the commands that use weights (evaluate, fewshot, predict, inspect) and that import, extract and export
them."""
