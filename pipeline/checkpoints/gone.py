"""What a run says whose folder, or whose checkpoints, were deleted while it ran."""


def gone_message(what: object, *, is_run: bool = False) -> str:
    """What a run says that cannot be continued because its files were deleted while it ran. `is_run`: its folder was,
    with the ledger, which would refuse to begin again where checkpoints are recorded and gone."""
    again = "run the same command to start from the beginning" if is_run else "start again in another --run-dir"
    return (
        f"{what} was deleted or moved while the run was using it, so nothing saved from now on could be continued; "
        f"put it back, or {again}"
    )
