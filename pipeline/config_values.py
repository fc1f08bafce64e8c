"""Choices that fields of several configurations share."""

from typing import Literal

Device = Literal["auto", "cpu", "cuda"]
LossName = Literal["softmax", "sigmoid"]
ClassWeights = Literal["equal", "balanced"]
