"""`pack_dependent`: what neighbours may change is run alone, request by request, unless its owner says otherwise."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from tests.bundles import relu_ffn, write_bundle
from tests.e2e.server import serving

D = 8
REQUESTS = 4


def coupled() -> onnx.ModelProto:
    """Each row plus the mean of its whole window."""
    model = relu_ffn(D, 2 * D)
    model.graph.node[-1].output[0] = "alone"
    model.graph.node.append(helper.make_node("ReduceMean", ["alone"], ["mean"], keepdims=1))
    model.graph.node.append(helper.make_node("Add", ["alone", "mean"], ["out"]))
    return model


@pytest.mark.parametrize("accepted", [False, True], ids=["by default", "pack_dependent"])
def test_whole_requests_of_a_dependent_model_share_windows_only_where_its_owner_says_so(
    tmp_path: Path, accepted: bool
) -> None:
    write_bundle(tmp_path, "coupled", coupled(), certificate="dependent")
    rng = np.random.default_rng()
    requests = [rng.standard_normal((rows, D), dtype=np.float32) for rows in range(1, REQUESTS + 1)]
    environment = {"TOKENSLAB_PACK_DEPENDENT": "coupled"} if accepted else {}
    # Nothing runs before all have come, or 10 s are over: a window of the one kind is full then, of the other long due.
    rows = sum(map(len, requests))
    flags = ("--threads", "1", "--max-wait-ms", "10000", "--max-window-tokens", str(rows)) if accepted else ()
    with serving(tmp_path, *flags, **environment) as server, ThreadPoolExecutor(REQUESTS) as clients:
        before = server.metric("tokenslab_windows_total")
        together = list(clients.map(lambda tokens: server.infer("coupled", tokens), requests))
        windows = server.metric("tokenslab_windows_total") - before
        if accepted:
            assert windows == 1
            return
        assert windows == REQUESTS
        for tokens, out in zip(requests, together, strict=True):
            np.testing.assert_array_equal(server.infer("coupled", tokens), out)
