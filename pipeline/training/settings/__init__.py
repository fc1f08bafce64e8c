"""A training job's settings and its schedule. These modules load no large library."""
