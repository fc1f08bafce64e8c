"""What a run says whose folder was deleted while it ran."""


def gone_message(what: object) -> str:
    """What a run says that cannot be continued because its folder was deleted while it ran."""
    return (
        f"{what} was deleted or moved while the run was using it, so nothing saved from now on could be continued; "
        "put it back, or run the same command to start from the beginning"
    )
