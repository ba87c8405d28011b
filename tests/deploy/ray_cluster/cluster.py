"""A Ray cluster of several nodes on this machine, each with a loopback address of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import psutil
import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster

from bench.process import free_port

HEAD = "127.0.0.2"  # not 127.0.0.1: Ray takes that for the machine's outer address
REPLICAS = "replicas"  # a resource of the worker nodes alone
FRONT = "front"  # of the head alone


@dataclass
class Nodes:
    """The cluster, with a Serve proxy on its head alone: the node that is killed is never the one that is asked."""

    cluster: Any
    port: int
    workers: list[Any] = field(default_factory=list)
    _addresses: Iterator[int] = field(default_factory=lambda: count(3))

    def add(self) -> None:
        """One more worker node."""
        address = f"127.0.0.{next(self._addresses)}"
        self.workers.append(self.cluster.add_node(num_cpus=4, node_ip_address=address, resources={REPLICAS: 100}))

    def kill(self) -> None:
        """The oldest worker node, every process of it, at once.

        Ray's own way ends the raylet first, whose workers then answer what they have.
        """
        node = self.workers.pop(0)
        started = [psutil.Process(info.process.pid) for infos in node.all_processes.values() for info in infos]
        for process in [child for parent in started for child in parent.children(recursive=True)] + started:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.cluster.remove_node(node, allow_graceful=False)


@contextmanager
def ray_cluster(workers: int) -> Iterator[Nodes]:
    """A head and `workers` nodes, Serve started; all of it stopped by Ray itself."""
    # Sockets lie in the folder, and a path to a socket has at most 107 bytes: pytest's own folders are too long.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        # Whatever folder the head is told, `Cluster` notes its address in the default one, which need not be there.
        patch.setenv("RAY_TMPDIR", folder)
        head = {
            "num_cpus": 1,
            "node_ip_address": HEAD,
            "include_dashboard": False,
            "resources": {FRONT: 100},
        }
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            nodes = Nodes(cluster, free_port())
            for _ in range(workers):
                nodes.add()
            ray.init(address=cluster.address, _node_ip_address=HEAD, log_to_driver=False)
            try:
                serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": nodes.port})
                yield nodes
                serve.shutdown()
            finally:
                ray.shutdown()
        finally:
            cluster.shutdown()
