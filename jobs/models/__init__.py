"""What weights are worth: evaluate, fewshot, predict, inspect; weights in and out."""
