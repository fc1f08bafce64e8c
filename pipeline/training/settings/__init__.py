"""A training job's settings, its schedule and its loggers; These modules load no large library."""
