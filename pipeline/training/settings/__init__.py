"""A training job's settings, its schedule and its loggers; they load nothing heavy."""
