"""One model over two processes, each a host with one device.

`python -m tests.support.hosts RANK ADDRESS JOB` is one of them, and runs a job of `tests.support.tensor_parallel`.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any

from tests.support.tensor_parallel import result


def address() -> str:
    """A free port of this machine whose next one is free, too."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as one:
            port = one.getsockname()[1]
            try:
                with socket.create_server(("127.0.0.1", port + 1)):
                    return f"127.0.0.1:{port}"
            except OSError:
                continue


def environment(devices: int = 1) -> dict[str, str]:
    """Of a process with as many devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    return os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}


def start(*arguments: str, devices: int = 1) -> subprocess.Popen[str]:
    """Start a command of Python in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(devices),
    )


def run(job: dict[str, Any]) -> dict[str, Any]:
    """What a job gives with `tensor_parallel_size` 2 over two processes."""
    where = address()
    both = [start(__name__, str(rank), where, json.dumps(job)) for rank in range(2)]
    done = [each.communicate(timeout=900) for each in both]
    assert [each.returncode for each in both] == [0, 0], [stderr[-3000:] for _, stderr in done]
    found: dict[str, Any] = json.loads(done[0][0].splitlines()[-1])
    return found


def _main(rank: int, where: str, job: dict[str, Any]) -> None:
    from xla_engine.config import EngineConfig
    from xla_engine.runner.hosts import Hosts

    config = EngineConfig(tensor_parallel_size=2)
    hosts = Hosts.lead(where, 2, config, None) if rank == 0 else Hosts.join(where, rank)[0]
    print(json.dumps(result(job, 2, hosts)))


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
