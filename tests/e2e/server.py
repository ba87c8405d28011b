"""A real `tokenslab serve` in a process of its own, on a free port, and the least of a client for the wire."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


@dataclass
class Server:
    """The process and what it has logged."""

    process: subprocess.Popen[str]
    port: int = 0
    log: list[str] = field(default_factory=list)
    reader: Thread | None = None

    def connect(self, timeout_s: float = 20) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)

    def raw(self, data: bytes = b"", timeout_s: float = 20) -> socket.socket:
        link = socket.create_connection(("127.0.0.1", self.port), timeout_s)
        link.sendall(data)
        return link

    def ask(
        self, path: str, body: bytes | None = None, headers: dict[str, str] | None = None, method: str | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """One request on a connection of its own."""
        link = self.connect()
        try:
            link.request(method or ("GET" if body is None else "POST"), path, body, headers or {})
            return answer(link.getresponse())
        finally:
            link.close()

    def infer(self, model: str, tokens: Array, seq_lens: list[int] | None = None) -> Array:
        """`out` for binary tokens; anything but 200 is an error."""
        body, headers = binary(tokens, seq_lens)
        status, got, data = self.ask(f"/v2/models/{model}/infer", body, headers)
        assert status == 200, data
        return out_of(got, data)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric over the label sets that contain `labels`."""
        return total(self.scrape(), name, **labels)

    def scrape(self) -> str:
        """All metrics, as they were at one moment."""
        return self.ask("/metrics")[2].decode()

    def accepted_tokens(self) -> float:
        """Tokens that wait, run, or were answered."""
        text = self.scrape()  # one: a request that is answered between two of them would count twice
        return total(text, "tokenslab_queue_tokens") + total(text, "tokenslab_tokens_total")

    def logged(self, text: str, timeout_s: float = 20) -> str:
        """The first line with `text`, once it has been read: an answer may arrive before the line about it."""
        until = time.monotonic() + timeout_s
        while True:
            for line in list(self.log):
                if text in line:
                    return line
            assert time.monotonic() < until, f"no line with {text!r} in {''.join(self.log)}"
            time.sleep(0.01)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 20) -> int:
        return self.process.wait(timeout_s)


def total(text: str, name: str, **labels: str) -> float:
    """The sum of a metric in an exposition over the label sets that contain `labels`."""
    found = re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", text, re.MULTILINE)
    wanted = {f'{key}="{value}"' for key, value in labels.items()}
    return sum(float(value) for label, value in found if wanted <= set(label.split(",")))


def answer(response: HTTPResponse) -> tuple[int, dict[str, str], bytes]:
    return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()


def binary(tokens: Array, seq_lens: list[int] | None = None, **parameters: Any) -> tuple[bytes, dict[str, str]]:
    """Body and headers of a binary infer request."""
    inputs = [tensor("tokens", "FP32", tokens)]
    tail = tokens.tobytes()
    if seq_lens is not None:
        lens = np.array(seq_lens, np.int64)
        inputs.append(tensor("seq_lens", "INT64", lens))
        tail += lens.tobytes()
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True, **parameters}}).encode()
    return head + tail, {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"}


def tensor(name: str, datatype: str, value: NDArray[Any]) -> dict[str, Any]:
    size = {"binary_data_size": value.nbytes}
    return {"name": name, "datatype": datatype, "shape": list(value.shape), "parameters": size}


def out_of(headers: dict[str, str], data: bytes) -> Array:
    length = int(headers["inference-header-content-length"])
    shape = json.loads(data[:length])["outputs"][0]["shape"]
    return np.frombuffer(data[length:], "<f4").reshape(shape)


def start(models: Path, *flags: str, program: str = "tokenslab", **environment: str) -> Server:
    """Start it without waiting; `program` is a module that takes tokenslab's own command line."""
    return launch(
        [sys.executable, "-m", program, "serve", "--models", str(models), "--port", "0", *flags], **environment
    )


def launch(command: list[str], **environment: str) -> Server:
    """Start it by any command, without waiting; none of its settings come from this process's environment."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TOKENSLAB_")}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**clean, **environment}
    )
    return Server(process)


def wait_until_listening(server: Server) -> None:
    """Read its log until it says where it listens; then keep reading in the background."""
    assert server.process.stdout is not None
    for line in server.process.stdout:
        server.log.append(line)
        if found := re.search(r"running on https?://127\.0\.0\.1:(\d+)", line):
            server.port = int(found[1])
            break
    else:
        raise AssertionError(f"it ended with {server.process.wait()}: {''.join(server.log)}")
    server.reader = Thread(target=lambda: server.log.extend(server.process.stdout or ()), daemon=True)
    server.reader.start()


def end(server: Server) -> None:
    """Kill it if it still runs, and give back what it held."""
    server.process.kill()
    server.process.wait()
    if server.reader is not None:
        server.reader.join()
    if server.process.stdout is not None:
        server.process.stdout.close()


@contextmanager
def serving(models: Path, *flags: str, program: str = "tokenslab", **environment: str) -> Iterator[Server]:
    """A server that is ready, and gone afterwards."""
    with listening(start(models, *flags, program=program, **environment)) as server:
        yield server


@contextmanager
def listening(server: Server) -> Iterator[Server]:
    """One that was started, once it is ready, and gone afterwards."""
    try:
        wait_until_listening(server)
        yield server
    finally:
        end(server)


def eventually(holds: Callable[[], bool], seconds: float = 40.0) -> bool:
    """Whether it comes to hold within so many seconds."""
    until = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True
