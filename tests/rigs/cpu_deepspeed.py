"""DeepSpeed, loaded for CPUs: it chooses when it is imported, and every fork of the tests trains on the CPU."""

import os

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed  # noqa: F401
