"""AGN and DiLoCo over two processes of two devices each, with `jax.distributed` and `jax.shard_map`.

This is the training of agn_pmap.py with one seed, and has the same figures up to rounding. Without a
process id the script starts itself twice on this machine, and waits for both processes. On two machines,
start it on each with a process id and the address of the first:

    python benchmarks/agn_multiprocess.py [--timeout SECONDS] [--out FILE.png]
    python benchmarks/agn_multiprocess.py --process-id 0 --coordinator HOST:PORT
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import jax
from agn_pmap import AXIS, METHODS, REPLICAS, report, train
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from launch import join, launch

PROCESSES = 2


def on_replicas(function: Callable[..., Any], donate_argnums: tuple[int, ...] = ()) -> Any:
    """Maps a function over all devices of all processes, along a leading axis."""

    def on_replica(*arguments: Any) -> Any:
        results = function(*jax.tree.map(lambda x: x[0], arguments))
        return jax.tree.map(lambda x: x[None], results)

    mesh = Mesh(jax.devices(), AXIS)
    mapped = jax.shard_map(on_replica, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS))
    return jax.jit(mapped, donate_argnums=donate_argnums)


def main() -> None:
    """Starts the processes, or is one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="agn_multiprocess.png", help="the file for the picture")
    about = "which process this is, from 0; without it all are started on this machine"
    parser.add_argument("--process-id", type=int, choices=range(PROCESSES), help=about)
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens")
    about = "the seconds after which processes that hang are ended"
    parser.add_argument("--timeout", type=float, default=300, help=about)
    chosen = parser.parse_args()
    if chosen.process_id is None:
        launch(__file__, sys.argv[1:], PROCESSES, chosen.timeout)
        return
    if chosen.coordinator is None:
        parser.error("--process-id needs --coordinator")
    join(chosen.coordinator, PROCESSES, chosen.process_id, REPLICAS // PROCESSES)
    results = {method: train(method, on_replicas, seeds=1) for method in METHODS}
    if jax.process_index() == 0:
        report(results, 1, chosen.out)


if __name__ == "__main__":
    main()
