"""What a job of Slurm decides, as tables: how a try ended and what follows, which nodes are used, which are avoided."""

from collections.abc import Mapping
from typing import Any

import pytest

from jobs.cluster.judge import (
    CheckFacts,
    NextTry,
    Partition,
    TryFacts,
    chosen,
    crashed_node,
    faults_of,
    judged,
    nodes_to_avoid,
    ports_of,
)

ALIKE = ("n1 mixed h100,ib 64/1000/gpu:8", "n2 mixed h100,ib 64/1000/gpu:8", "n3 idle h100,ib 64/1000/gpu:8")
Answer = tuple[int | None, tuple[str, ...]]
ANY = "gpu|(null)||(null)|"
TWO: dict[str, Any] = {"nodes": ("n1", "n2"), "num_ranks": 2, "retries": 2}


def after(**facts: Any) -> NextTry:
    return judged(TryFacts(**(TWO | {"has_marker": True} | facts)))


@pytest.mark.parametrize(
    ("facts", "then", "code", "end"),
    [
        pytest.param({"codes": {0: 2, 1: 143}}, "exit", 2, "at fault", id="a user's mistake"),
        pytest.param({"codes": {0: 78, 1: 78}}, "exit", 78, "at fault", id="it would not succeed"),
        pytest.param({"codes": {0: 74, 1: 2}}, "exit", 2, "at fault", id="a mistake beside a fault outside"),
        pytest.param({"codes": {0: 1}}, "again", 75, "crashed", id="training finds no faults: 1 is a crash"),
        pytest.param({"codes": {0: 1}, "has_marker": False}, "exit", 1, "at fault", id="a check that found faults"),
        pytest.param({"codes": {0: 75, 1: 75}}, "requeue", 75, "stopped", id="stopped with its work saved"),
        pytest.param({"codes": {0: 75, 1: 137}}, "again", 75, "crashed", id="srun asked the other rank to stop"),
        pytest.param(
            {"codes": {0: 75, 1: 137}, "is_asked": True}, "requeue", 75, "stopped", id="asked, and one rank was late"
        ),
        pytest.param({"codes": {0: 0, 1: 0}}, "again", 75, "crashed", id="0 without a DONE that vouches"),
        pytest.param({"codes": {}}, "again", 75, "crashed", id="srun lost a node, or was killed"),
        pytest.param({"codes": {}, "number": 2}, "requeue", 75, "crashed", id="the last try in this allocation"),
        pytest.param({"codes": {}, "is_asked": True}, "requeue", 75, "asked to stop", id="asked before the ranks ran"),
        pytest.param({"codes": {0: 9}, "is_asked": True}, "requeue", 75, "asked to stop", id="no time for another try"),
        pytest.param({"codes": {0: 75, 1: 75}, "stop": "R/STOP"}, "exit", 78, "told to stop", id="a file STOP"),
        pytest.param(
            {"codes": {0: 2}, "stop": "R/STOP"}, "exit", 78, "told to stop", id="ranks that start refuse STOP"
        ),
        pytest.param({"codes": {0: 78}, "stop": "R/STOP"}, "exit", 78, "at fault", id="hopeless even with STOP"),
        pytest.param({"full": "/state"}, "again", 75, "", id="no room: the next try waits for it"),
        pytest.param({"full": "/state", "is_asked": True}, "requeue", 75, "", id="no room, and no time to wait"),
        pytest.param({"full": "/state", "idle": 2}, "exit", 78, "gave up", id="no room for three tries"),
        pytest.param({"codes": {0: 9}, "idle": 2}, "exit", 78, "gave up", id="three crashes in a row"),
        pytest.param({"codes": {0: 75, 1: 75}, "idle": 2}, "exit", 78, "gave up", id="three stops that saved nothing"),
        pytest.param({"is_asked": True, "idle": 2}, "exit", 78, "gave up", id="three limits before anything was saved"),
        pytest.param({"codes": {0: 9}, "idle": 2, "has_saved": True}, "again", 75, "crashed", id="it saves each time"),
    ],
)
def test_what_follows_from_the_end_of_a_try(facts: dict[str, Any], then: str, code: int, end: str) -> None:
    found = after(**facts)
    assert (found.then, found.code, found.end, found.gives_up) == (then, code, end, end == "gave up")


@pytest.mark.parametrize(
    ("facts", "idle"),
    [
        pytest.param({"codes": {0: 9}, "idle": 1}, 2, id="it saved nothing"),
        pytest.param({"codes": {0: 9}, "idle": 1, "has_saved": True}, 0, id="it saved something"),
        pytest.param({"codes": {0: 2}, "idle": 1}, None, id="a mistake is not counted"),
        pytest.param({"stop": "R/STOP", "idle": 1}, None, id="nor a stop"),
        pytest.param({"codes": {0: 9}, "idle": 2}, 0, id="a job that gives up: the next one starts from 0"),
        pytest.param({"is_asked": True, "idle": 2}, 0, id="also after three limits"),
        pytest.param({"full": "/state", "idle": 1}, 2, id="there was no room"),
        pytest.param({"full": "/state", "idle": 2}, 0, id="also after no room three times"),
    ],
)
def test_tries_that_save_nothing_are_counted(facts: dict[str, Any], idle: int | None) -> None:
    assert after(**facts).idle == idle


@pytest.mark.parametrize(
    ("codes", "idle", "seconds"),
    [
        pytest.param({0: 74}, 1, 120, id="storage failed, and the next try is the last"),
        pytest.param({0: None}, 1, 120, id="the disk had no room for a rank's exit code"),
        pytest.param({0: 74}, 0, None, id="there are more tries"),
        pytest.param({0: 9}, 1, None, id="a crash needs no time"),
        pytest.param({0: 75, 1: 75}, 1, None, id="it stopped well"),
    ],
)
def test_storage_gets_time_before_the_last_try(codes: dict[int, int | None], idle: int, seconds: int | None) -> None:
    assert after(codes=codes, idle=idle).pause_seconds == seconds


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"codes": {0: 2}}, "exit code 2: not tried again, it would end the same way"),
        (
            {"codes": {0: 9}},
            "crashed, tries in a row that saved nothing new: 1; trying again in this allocation",
        ),
        ({"codes": {0: 9}, "number": 2}, "crashed, tries in a row that saved nothing new: 1; to be continued"),
        ({"codes": {0: 75, 1: 75}}, "stopped, tries in a row that saved nothing new: 1; to be continued"),
        ({"stop": "R/STOP"}, "stopped by R/STOP: delete it and submit again to continue"),
        ({"is_asked": True}, "asked to stop before anything could be saved: to be continued"),
        ({"full": "S", "is_asked": True}, "asked to stop while S takes no file: to be continued"),
        (
            {"codes": {0: 9}, "idle": 2},
            "crashed, the last of 3 tries in a row that saved nothing new: not tried again; see the log above",
        ),
        (
            {"is_asked": True, "idle": 2},
            "asked to stop before anything was saved, 3 times in a row: it needs more time before its limit",
        ),
        (
            {"full": "S", "idle": 2},
            "S takes no file, 3 times in a row: make room, or have the disk looked at; then submit again",
        ),
    ],
)
def test_the_words_of_each_end(facts: dict[str, Any], words: str) -> None:
    assert after(**facts).words == words


@pytest.mark.parametrize(
    ("codes", "node"),
    [
        pytest.param({0: 139, 1: 74, 2: 74, 3: 74}, "n1", id="others have lost it"),
        pytest.param({2: 70, 3: 70, 0: 74}, "n2", id="both ranks of a node, and one was killed"),
        pytest.param({2: 137, 0: 137, 1: 143}, "n2", id="out of memory; srun kills the others later"),
        pytest.param({0: 70, 1: 70, 2: 70, 3: 70}, "", id="a bug"),
        pytest.param({0: 74, 1: 74, 2: 75, 3: 0}, "", id="a fault outside"),
        pytest.param({0: None}, "", id="no room for the code"),
        pytest.param({9: 139}, "", id="no rank of this try"),
        pytest.param({}, "", id="a node was lost"),
    ],
)
def test_the_node_whose_ranks_crash_by_themselves(codes: dict[int, int | None], node: str) -> None:
    """There are two nodes with two ranks each. The codes are in the order in which the ranks ended."""
    assert crashed_node(TryFacts(codes=codes, nodes=("n1", "n2"), num_ranks=4, ranks_per_node=2)) == node


@pytest.mark.parametrize(
    ("facts", "node"),
    [
        pytest.param({"codes": {0: 139}}, "n1", id="it saved nothing"),
        pytest.param({"codes": {0: 139}, "has_saved": True}, "", id="it saves between its crashes, and needs no other"),
        pytest.param({"codes": {0: 74}}, "", id="a fault outside"),
    ],
)
def test_the_only_node_of_a_job_is_blamed_if_nothing_was_saved(facts: dict[str, Any], node: str) -> None:
    assert crashed_node(TryFacts(nodes=("n1",), **facts)) == node


def check(answers: Mapping[str, Answer], **facts: Any) -> CheckFacts:
    nodes = facts.pop("nodes", tuple(answers))
    return CheckFacts(nodes=nodes, answers=answers, **({"num_needed": 2, "server_clock": 1000} | facts))


def without(found: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in found.items() if name not in names}


@pytest.mark.parametrize(
    ("before", "end", "after"),
    [(0, "too few nodes", 1), (1, "too few nodes", 2), (2, "gave up", 0), (3, "gave up", 0)],
)
def test_too_few_nodes_are_counted_and_the_job_after_the_last_starts_from_0(before: int, end: str, after: int) -> None:
    decision = chosen(check({"n1": (1000, ())}, nodes=("n1", "n2"), idle=before)).decision
    assert decision
    assert (decision.end, decision.idle) == (end, after)


WELL: dict[str, Answer] = dict.fromkeys(("n1", "n2", "n3"), (1000, ()))


@pytest.mark.parametrize(
    ("facts", "nodes", "left_out", "end"),
    [
        pytest.param(check(WELL), ("n1", "n2"), (), "", id="the third is a spare one"),
        pytest.param(
            check(WELL | {"n2": (1000, ("gpu", "s3"))}), ("n1", "n3"), ("n2",), "", id="a spare takes its place"
        ),
        pytest.param(check({"n1": (1000, ())}, nodes=("n1", "n2")), ("n1",), ("n2",), "too few nodes", id="no answer"),
        pytest.param(
            check({"n1": (1000, ())}, nodes=("n1", "n2"), idle=2), ("n1",), ("n2",), "gave up", id="for the third time"
        ),
        pytest.param(check(WELL, crashes={"n1": 2}), ("n2", "n3"), ("n1",), "", id="a node that crashes is left out"),
        pytest.param(check(WELL, crashes={"n1": 1}), ("n1", "n2"), (), "", id="but not after the first time"),
        pytest.param(
            check(WELL, num_needed=3, crashes={"n1": 2}),
            ("n1", "n2", "n3"),
            (),
            "",
            id="it is used if there is no other",
        ),
        pytest.param(
            check(
                {name: WELL[name] for name in ("n1", "n2")},
                crashes={"n2": 2},
                idle=2,
                partition=Partition(job=ANY, own=("n1", "n2"), nodes=ALIKE),
            ),
            *(("n1",), ("n2",), "too few nodes"),
            id="the job is requeued to another, which has tries of its own",
        ),
        pytest.param(
            check(WELL | dict.fromkeys(("n2", "n3"), (1000, ("unshared",))), num_needed=1),
            *(("n1",), ("n2", "n3"), "gave up"),
            id="only the first node sees the folder",
        ),
        pytest.param(check({"n1": (1000, ())}, num_needed=1), ("n1",), (), "", id="one node shares with nobody"),
        pytest.param(
            check(WELL, num_needed=1, crashes={"n1": 2}, idle=2), ("n2",), ("n1",), "", id="one node is needed: a spare"
        ),
        pytest.param(
            check(WELL, num_needed=1, crashes={"n1": 2}, idle=1),
            ("n1",),
            (),
            "",
            id="a job of one node saved something since",
        ),
        pytest.param(
            check(
                {"n1": (1000, ())},
                num_needed=1,
                crashes={"n1": 2},
                idle=2,
                partition=Partition(job=ANY, own=("n1",), nodes=ALIKE),
            ),
            *((), ("n1",), "too few nodes"),
            id="a job of one node is requeued to another",
        ),
    ],
)
def test_the_nodes_of_a_try(facts: CheckFacts, nodes: tuple[str, ...], left_out: tuple[str, ...], end: str) -> None:
    found = chosen(facts)
    assert (found.nodes, found.left_out, found.decision.end if found.decision else "") == (nodes, left_out, end)


FOUND = {"shared": "", "writable": "", "scratch": "", "scratch-kib": "262144", "shm-kib": "65536"}


@pytest.mark.parametrize(
    ("found", "faults"),
    [
        pytest.param(FOUND, (), id="nothing is wrong"),
        pytest.param(without(FOUND, "shared", "writable"), ("unshared",), id="what is not there cannot be written"),
        pytest.param(without(FOUND, "writable"), ("read-only",), id="the folder is there"),
        pytest.param(without(FOUND, "scratch"), ("no-scratch",), id="no temporary file can be made"),
        pytest.param(FOUND | {"scratch-kib": "262143"}, ("scratch-full",), id="less than 256 MiB"),
        pytest.param(FOUND | {"scratch-kib": "-"}, ("scratch-full",), id="df says no number"),
        pytest.param(FOUND | {"shm-kib": "65535"}, ("shm-full",), id="less than 64 MiB"),
        pytest.param(FOUND | {"gpus": "8", "gpus-asked": "8"}, (), id="all GPUs answer"),
        pytest.param(FOUND | {"gpus": "7", "gpus-asked": "8"}, ("gpu",), id="one has fallen off the bus"),
        pytest.param(
            {},
            ("unshared", "no-scratch", "scratch-full", "shm-full"),
            id="a node that finds nothing",
        ),
    ],
)
def test_what_is_wrong_with_a_node(found: dict[str, str], faults: tuple[str, ...]) -> None:
    assert faults_of(found) == faults
    assert faults_of(found, has_store=True) == (*faults, "s3")
    assert faults_of(found | {"s3": ""}, has_store=True) == faults


S3: dict[str, Answer] = dict.fromkeys(("n1", "n2", "n3"), (1000, ("s3",)))


@pytest.mark.parametrize(
    ("facts", "nodes", "left_out", "store"),
    [
        pytest.param(check(WELL, has_store=True), ("n1", "n2"), (), "answers", id="all reach it"),
        pytest.param(check(S3 | {"n3": (1000, ())}, has_store=True), ("n3",), ("n1", "n2"), "answers", id="one does"),
        pytest.param(check(S3, has_store=True), ("n1", "n2"), (), "away", id="none does: that is no fault of theirs"),
        pytest.param(
            check(S3 | {"n1": (1000, ("gpu", "s3"))}, has_store=True), ("n2", "n3"), ("n1",), "away", id="but this is"
        ),
        pytest.param(check(WELL), ("n1", "n2"), (), "", id="there is no store"),
        pytest.param(check({}, nodes=("n1", "n2", "n3"), has_store=True), ("n1", "n2"), (), "", id="nobody answers"),
    ],
)
def test_a_store_that_no_node_reaches_is_no_fault_of_the_nodes(
    facts: CheckFacts, nodes: tuple[str, ...], left_out: tuple[str, ...], store: str
) -> None:
    found = chosen(facts)
    assert (found.nodes, found.left_out, found.store) == (nodes, left_out, store)


@pytest.mark.parametrize(
    ("is_checked", "says"),
    [(True, ("no node answered, not even this one: nothing was checked",)), (False, ())],
)
def test_nodes_of_which_nothing_is_known_are_used(is_checked: bool, says: tuple[str, ...]) -> None:
    found = chosen(check({}, nodes=("n1", "n2", "n3"), is_checked=is_checked, crashes={"n1": 2}))
    assert (found.nodes, found.left_out, found.says, found.decision) == (("n1", "n2"), (), says, None)


def test_ports_differ_from_job_to_job_and_from_try_to_try() -> None:
    ports = ports_of(job=7, start=0, number=0)
    assert ports[:2] == [20_707, 21_704]
    assert len(set(ports)) == 100
    assert all(20_000 <= port < 32_000 for port in ports_of(job=99_999_999, start=9, number=9))
    firsts = [
        ports_of(job=job, start=start, number=number)[0] for job in (7, 8) for start in (0, 1) for number in (0, 1)
    ]
    assert len(set(firsts)) == len(firsts)


def test_what_is_said_of_nodes() -> None:
    found = chosen(check(WELL | {"n3": (1000, ("gpu", "s3"))}, num_needed=3, seconds=4))
    assert found.says == (
        "node n3 is left out: gpu,s3",
        "checked 3 nodes in 4 s, 2 are healthy, 3 are needed",
    )
    words = "too few healthy nodes: to be continued. To avoid them, submit with --exclude=n3"
    assert found.decision == NextTry(then="requeue", end="too few nodes", words=words, idle=1)


@pytest.mark.parametrize(
    ("clocks", "server", "odd", "says"),
    [
        pytest.param((1000, 1001, 1040), 1000, (), False, id="alike"),
        pytest.param((5000, 1001, 1000), 1000, ("n1",), False, id="that of the first node, where the script runs"),
        pytest.param((0, 1001, 1000), 1000, ("n1",), False, id="behind"),
        pytest.param((1000, 1001, 1000), 9000, (), False, id="that of the file server"),
        pytest.param((5000, 1000), 1000, ("n1",), False, id="the file server decides between two"),
        pytest.param((5000,), 1000, (), True, id="one against the file server"),
        pytest.param((5000, 5000, 1000), 1000, (), True, id="two against two"),
        pytest.param((5000, 1000, 1000, 9000), 1001, ("n1", "n4"), False, id="two different ones"),
    ],
)
def test_the_odd_clock_is_left_out(clocks: tuple[int, ...], server: int, odd: tuple[str, ...], says: bool) -> None:
    """A wrong clock on the first node once made all other nodes look wrong."""
    answers = {f"n{number}": (clock, ()) for number, clock in enumerate(clocks, 1)}
    found = chosen(check(answers, num_needed=1, server_clock=server))
    assert (found.left_out, any("set them" in line for line in found.says)) == (odd, says)


@pytest.mark.parametrize(
    ("job", "nodes", "excluded", "avoided"),
    [
        pytest.param(ANY, ALIKE, (), {"n2"}, id="n1 and n3 are alike"),
        pytest.param("gpu|h100||(null)|", ALIKE, (), {"n2"}, id="they have the feature"),
        pytest.param(ANY, ALIKE + ALIKE, (), {"n2"}, id="a node in two partitions counts once"),
        pytest.param("gpu|(null)||(null)|n9", ALIKE, ("n9",), {"n2", "n9"}, id="one is avoided already"),
        pytest.param("gpu|a100||(null)|", ALIKE, (), set(), id="no node has the feature"),
        pytest.param("gpu|h100&ib||(null)|", ALIKE, (), set(), id="features that are not understood"),
        pytest.param("gpu|(null)|n2|(null)|", ALIKE, (), set(), id="the job asked for certain nodes"),
        pytest.param("gpu|(null)||vit|", ALIKE, (), set(), id="or for a reservation"),
        pytest.param("gpu|(null)||(null)|n3", ALIKE, ("n3",), set(), id="too few are left"),
        pytest.param(ANY, (*ALIKE[:2], "n3 drained h100,ib 64/1000/gpu:8"), (), set(), id="the other is drained"),
        pytest.param(ANY, (*ALIKE[:2], "n3 idle h100,ib 32/1000/gpu:8"), (), set(), id="the other is smaller"),
        pytest.param(ANY, (), (), set(), id="Slurm says nothing of nodes"),
        pytest.param("", ALIKE, (), set(), id="nor of the job"),
    ],
)
def test_nodes_are_avoided_only_if_others_can_take_their_place(
    job: str, nodes: tuple[str, ...], excluded: tuple[str, ...], avoided: set[str]
) -> None:
    """The second of a job's two nodes was sick. With too few others like it, the job would wait for ever."""
    partition = Partition(job=job, own=("n1", "n2"), excluded=excluded, nodes=nodes)
    assert set(nodes_to_avoid(("n2",), partition)) == avoided
    assert nodes_to_avoid((), partition) == ()
