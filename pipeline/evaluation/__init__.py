"""Evaluation: scores over whole datasets, few-shot accuracy, and predictions for images."""
