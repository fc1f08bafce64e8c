"""The jobs' dataclasses, which load nothing heavy."""
