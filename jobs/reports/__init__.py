"""Runs on a page: ls, report, compare and show."""
