"""Runs and jobs as text and on pages: ls, report, compare, show and diff."""
