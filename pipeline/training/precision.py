"""The precision that a run computes in: decided when it first starts, and kept. Pure."""

from dataclasses import dataclass
from typing import Literal

from pipeline.ranks.bf16 import Bf16

Precision = Literal["bf16", "fp32"]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """`message`: the reason (empty if the job names a precision that is fine here). `is_warning`: it is slow here."""

    precision: Precision
    message: str = ""
    is_warning: bool = False


def choose_precision(wanted: Literal["auto", "bf16", "fp32"], *, recorded: str, bf16: Bf16) -> Choice:
    """`wanted`: what the job says. `recorded`: the precision in the checkpoint that the run continues from, empty
    if it starts. `bf16`: what every rank's device can do."""
    if wanted != "auto":
        return _as_demanded(wanted, recorded=recorded, bf16=bf16)
    if recorded in ("bf16", "fp32"):
        return _as_recorded("bf16" if recorded == "bf16" else "fp32", bf16=bf16)
    precision: Precision = "bf16" if bf16.is_native else "fp32"
    return Choice(precision=precision, message=f"precision {precision}: {bf16.reason}")


def _as_demanded(wanted: Precision, *, recorded: str, bf16: Bf16) -> Choice:
    before = f" (the run began with {recorded})" if recorded not in ("", wanted) else ""
    if wanted == "bf16" and not bf16.is_native:
        advice = "" if recorded == "bf16" else "; --engine.precision auto would take fp32"
        message = f"precision bf16, as the job says{before}, though {bf16.reason}{advice}"
        return Choice(precision=wanted, message=message, is_warning=True)
    return Choice(precision=wanted, message=f"precision {wanted}, as the job says{before}" if before else "")


def _as_recorded(recorded: Precision, *, bf16: Bf16) -> Choice:
    message = f"precision {recorded}, as when the run started"
    if (recorded == "bf16") == bf16.is_native:
        return Choice(precision=recorded, message=message)
    is_slow = recorded == "bf16"
    return Choice(precision=recorded, message=f"{message}, though {bf16.reason}", is_warning=is_slow)
