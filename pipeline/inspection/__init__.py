"""Figures of what a trained model has learned: filters, positions, attention, and effects of shifts."""
