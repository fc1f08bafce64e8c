"""Sizes and transforms that cannot work are refused when they are given."""
