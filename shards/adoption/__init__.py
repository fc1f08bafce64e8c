"""Tars made by others become a dataset where they lie."""
