"""Clients that ask without pause and compare every answer bit for bit with the model alone in this process."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
from numpy.typing import NDArray

from service.session import open_session, run_packed

CLIENTS = 16
RETRY_S = 0.05


@dataclass(frozen=True)
class Question:
    """A request and the bits of its answer."""

    model: str
    head: bytes
    body: bytes
    out: bytes


def questions(models: Path, name: str, precisions: Sequence[str], count: int) -> list[Question]:
    """Fresh ragged windows for each precision, answered by the whole file on one thread."""
    rng = np.random.default_rng()
    made = []
    for precision in precisions:
        session = open_session(models / name / "1" / f"{precision}-cpu.onnx", "cpu", 1)
        d = session.get_inputs()[0].shape[1]
        for _ in range(count):
            lens = rng.integers(1, 20, rng.integers(1, 6)).astype(np.int64)
            tokens = rng.standard_normal((lens.sum(), d), dtype=np.float32)
            parts: list[tuple[str, str, NDArray[Any]]] = [("tokens", "FP32", tokens), ("seq_lens", "INT64", lens)]
            inputs = [
                {
                    "name": name_,
                    "datatype": datatype,
                    "shape": list(array.shape),
                    "parameters": {"binary_data_size": array.nbytes},
                }
                for name_, datatype, array in parts
            ]
            head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
            body = head + tokens.tobytes() + lens.tobytes()
            out = run_packed(session, tokens, lens).tobytes()
            made.append(Question(f"{name}-{precision}", b"%d" % len(head), body, out))
    return made


@dataclass
class Tally:
    """What became of all requests."""

    right: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[tuple[float, float, str]] = field(default_factory=list)  # began, ended, how
    gave_up: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def wait_for(self, more: int, limit_s: float) -> None:
        """Until `more` further requests are answered rightly."""
        target, ends = self.right + more, time.monotonic() + limit_s
        while self.right < target:
            assert time.monotonic() < ends, f"{self.right} of {target} answers after {limit_s} s: {self.failed[-3:]}"
            time.sleep(0.02)

    def wait_for_silence(self, seconds: float, limit_s: float) -> None:
        """Until nothing was answered for so long: every client waits."""
        ends, seen, since = time.monotonic() + limit_s, self.right, time.monotonic()
        while (now := time.monotonic()) - since < seconds:
            assert now < ends, f"never {seconds} s without an answer"
            if self.right != seen:
                seen, since = self.right, now
            time.sleep(0.02)


def ask(port: int, question: Question) -> tuple[int, dict[str, str], bytes]:
    """One request on a connection of its own."""
    link = HTTPConnection("127.0.0.1", port, timeout=40)
    try:
        headers = {"Inference-Header-Content-Length": question.head.decode()}
        link.request("POST", f"/v2/models/{question.model}/infer", question.body, headers)
        answer = link.getresponse()
        return answer.status, {key.lower(): value for key, value in answer.getheaders()}, answer.read()
    finally:
        link.close()


def metric(port: int, name: str) -> float:
    """The sum of a counter of the front, over its labels."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=40) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}_total"))


@contextmanager
def load(port: int, asked: Sequence[Question]) -> Iterator[Tally]:
    """`CLIENTS` clients, each with one request in flight; what fails is asked again until it is answered."""
    tally, stop = Tally(), threading.Event()

    def client(seed: int) -> None:
        rng = np.random.default_rng(seed)
        while not stop.is_set():
            question = asked[int(rng.integers(len(asked)))]
            for _ in range(100):
                began = time.monotonic()
                found = _outcome(port, question)
                with tally.lock:
                    if found is None:
                        tally.right += 1
                        break
                    if found.startswith("wrong"):
                        tally.wrong.append(found)
                        break
                    tally.failed.append((began, time.monotonic(), found))
                time.sleep(RETRY_S)
            else:
                tally.gave_up.append(question.model)

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield tally
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _outcome(port: int, question: Question) -> str | None:
    """None: the right bits."""
    try:
        status, headers, body = ask(port, question)
    except (OSError, HTTPException) as error:
        return f"{type(error).__name__}: {error}"
    if status != 200:
        return f"{status}: {body[:200]!r}"
    data: Any = body[int(headers["inference-header-content-length"]) :]
    return None if data == question.out else f"wrong bits from {question.model}"
