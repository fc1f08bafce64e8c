"""Reads samples in the planned order, one window ahead, in threads that one call closes."""
