"""Holds the commands that show runs and jobs as text or on pages: ls, report, compare, show and diff."""
