"""Recipes: functions that return a whole job, with its source, its expected result and its command in the docstring."""
