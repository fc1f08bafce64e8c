"""Commands that use weights (evaluate, fewshot, predict, inspect), and those that import, extract and export them."""
