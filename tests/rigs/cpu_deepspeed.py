"""Imports DeepSpeed for CPUs: it chooses its accelerator on import, and all forks of the tests train on the CPU."""

import os

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed  # noqa: F401
