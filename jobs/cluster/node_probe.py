"""What each rank of preflight's job on all nodes runs: a line of JSON after each of its two steps. Not for users."""

import json
from dataclasses import asdict

from jobs import exit_codes
from jobs.cluster.preflight_nodes import NodeFound
from jobs.output import put
from pipeline.machine.node_speed import exchange, product_seconds
from pipeline.ranks.world import current_world
from shards.errors import UserError


def run(words: list[str]) -> int:
    """`words`: the node's name in Slurm."""
    if len(words) != 1:
        raise UserError(f"__probe takes the name of the node, got {len(words)} words")
    world = current_world("auto")
    found = NodeFound(node=words[0], rank=world.rank, product_seconds=product_seconds(world.device))
    put(json.dumps(asdict(found)) + "\n")
    fault = exchange(world) if world.num_ranks > 1 else ""
    put(json.dumps(asdict(found) | {"has_exchanged": True, "fault": fault}) + "\n")
    return exit_codes.FAULTS_FOUND if fault else exit_codes.DONE
