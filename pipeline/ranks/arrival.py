"""Which ranks have not arrived where all of them meet, and on which hosts they should be.

All are expected within a limit after the first. Rank 0 sees at the store who is there, and tells the others, so that
all ranks end with one message instead of a timeout of whatever they do next.
"""

import re
from collections.abc import Mapping, Sequence

from pipeline.ranks.environment import RankPlace

_MOST_HOSTS = 8
_LIST = re.compile(r"([^\[\],]+)(?:\[([0-9,-]+)\])?([^\[\],]*)(?:,|$)")
UNKNOWN = ""


def missing_message(missing: Sequence[int], hosts: Sequence[str], *, seconds: float) -> str:
    """Who has not arrived, by host. `hosts`: of all ranks, UNKNOWN for some. Pure."""
    by_host: dict[str, list[int]] = {}
    for rank in missing:
        by_host.setdefault(hosts[rank], []).append(rank)
    named = [
        f"{ranks_words(ranks)} on {f'host {host}' if host else 'a host that is not known'}"
        for host, ranks in by_host.items()
    ]
    more = f"; {len(named) - _MOST_HOSTS} more hosts" if len(named) > _MOST_HOSTS else ""
    verb = "has" if len(missing) == 1 else "have"
    return (
        f"{ranks_words(missing)} of {len(hosts)} {verb} not arrived within {seconds:.0f} s: "
        f"{'; '.join(named[:_MOST_HOSTS])}{more}; see the logs of these ranks, or leave their hosts out"
    )


def ranks_words(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 2` or `ranks 0, 8-15`; the ranks are in rising order."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(shown)}"


def hosts_of(environ: Mapping[str, str], place: RankPlace, arrived: Mapping[int, str]) -> list[str]:
    """The host of each rank: as it says itself if it has arrived, else where its launcher has put it, UNKNOWN if that
    cannot be told. Pure. `arrived`: hosts by rank.

    Slurm lists the nodes of a step, and fills them one after another unless it is told otherwise. torchrun and
    `--processes` start equally many ranks on each host.
    """
    hosts = [UNKNOWN] * place.num_ranks
    if "RANK" not in environ:
        found = _slurms(environ)
        hosts = found if len(found) == place.num_ranks else hosts
    elif "LOCAL_WORLD_SIZE" in environ:
        by_node = {rank // place.num_local_ranks: host for rank, host in arrived.items()}
        hosts = [by_node.get(rank // place.num_local_ranks, UNKNOWN) for rank in range(place.num_ranks)]
    return [arrived.get(rank, host) for rank, host in enumerate(hosts)]


def _slurms(environ: Mapping[str, str]) -> list[str]:
    """The node of each task of a Slurm step, in the order of the tasks; empty if they are not in blocks."""
    if not environ.get("SLURM_DISTRIBUTION", "block").startswith("block"):
        return []
    nodes = nodes_in(environ.get("SLURM_STEP_NODELIST", ""))
    counts: list[int] = []
    for entry in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        if found := re.fullmatch(r"([0-9]{1,7})(?:\(x([0-9]{1,7})\))?", entry):
            counts += [int(found[1])] * min(int(found[2] or 1), len(nodes))
    if len(counts) != len(nodes):
        return []
    return [node for node, count in zip(nodes, counts, strict=True) for _ in range(count)]


def nodes_in(text: str) -> list[str]:
    """The names in one of Slurm's lists, such as `n[1-3,07],login`; empty if it has another form."""
    nodes: list[str] = []
    if "".join(match[0] for match in _LIST.finditer(text)) != text:
        return []
    for before, ranges, after in _LIST.findall(text):
        for one in ranges.split(",") if ranges else ("",):
            first, _, last = one.partition("-")
            numbers = range(int(first), int(last or first) + 1) if first else (None,)
            names = (f"{number:0{len(first)}d}" if number is not None else "" for number in numbers)
            nodes += [f"{before}{name}{after}" for name in names]
    return nodes
