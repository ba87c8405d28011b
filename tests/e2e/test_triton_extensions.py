"""Configuration and statistics as Triton's client and perf_analyzer read them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.settings import Settings
from tests.e2e.conftest import D
from tests.e2e.server import Server

DURATIONS = {"success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss"}


@pytest.fixture
def client(server: Server) -> Any:
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        yield client


def test_the_configuration_says_how_to_size_a_request(client: Any) -> None:
    config = client.get_model_config("ffn")
    assert config["platform"] == "onnxruntime_onnx"
    assert config["backend"] == "onnxruntime"
    assert config["max_batch_size"] == Settings().max_queue_tokens, "tokens of one request"
    assert [(one["name"], one["data_type"], one["dims"]) for one in config["input"]] == [("tokens", "TYPE_FP32", [D])]
    assert [(one["name"], one["data_type"], one["dims"]) for one in config["output"]] == [("out", "TYPE_FP32", [D])]
    assert config["dynamic_batching"]["max_queue_delay_microseconds"] == 0
    assert client.get_model_config("ffn", "1") == config


def test_a_model_with_sequences_has_no_batch_dimension(client: Any) -> None:
    config, metadata = client.get_model_config("mean"), client.get_model_metadata("mean")
    assert config["max_batch_size"] == 0
    assert [one["dims"] for one in config["input"]] == [one["shape"] for one in metadata["inputs"]] == [[-1, D], [-1]]
    assert [one["optional"] for one in config["input"]] == [False, True]


def test_what_perf_analyzer_reads_unchecked_is_there(client: Any) -> None:
    """Metadata, config and extensions, field by field as its model parser reads them."""
    for name in ("ffn", "mean"):
        metadata, config = client.get_model_metadata(name), client.get_model_config(name)
        assert metadata["name"] == name
        assert {one["name"] for one in config["input"]} <= {one["name"] for one in metadata["inputs"]}
        assert {one["name"] for one in config["output"]} <= {one["name"] for one in metadata["outputs"]}
        assert isinstance(config["max_batch_size"], int)
        assert config["model_transaction_policy"]["decoupled"] is False
        assert "dynamic_batching" in config
        assert not {"sequence_batching", "ensemble_scheduling", "response_cache"} & config.keys()
        for one in (*config["input"], *config["output"]):
            assert one["is_shape_tensor"] is False
    assert "statistics" in client.get_server_metadata()["extensions"]


def only_integers(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(only_integers, value.values()))
    if isinstance(value, list):
        return all(map(only_integers, value))
    return type(value) is int


def snapshot(client: Any, name: str, version: str = "") -> dict[str, Any]:
    (entry,) = client.get_inference_statistics(name, version)["model_stats"]
    assert isinstance(entry, dict)
    return entry


def check_form(entry: dict[str, Any]) -> None:
    assert entry["version"] == "1"
    assert set(entry["inference_stats"]) == DURATIONS
    assert all(set(duration) == {"count", "ns"} for duration in entry["inference_stats"].values())
    rest = {key: value for key, value in entry.items() if key not in ("name", "version")}
    assert only_integers(rest)
    for batch in entry["batch_stats"]:
        assert set(batch) == {"batch_size", "compute_input", "compute_infer", "compute_output"}


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 50), min_size=1, max_size=5), st.booleans())
def test_statistics_count_what_was_asked_whatever_that_was(client: Any, sizes: list[int], bad: bool) -> None:
    before = snapshot(client, "ffn")
    for rows in sizes:
        tokens = triton.InferInput("tokens", [rows, D], "FP32")
        tokens.set_data_from_numpy(np.random.default_rng().standard_normal((rows, D), dtype=np.float32))
        client.infer("ffn", [tokens])
    if bad:
        wrong = triton.InferInput("tokens", [1, D + 1], "FP32")
        wrong.set_data_from_numpy(np.zeros((1, D + 1), np.float32))
        with pytest.raises(triton.InferenceServerException):
            client.infer("ffn", [wrong])
    after = snapshot(client, "ffn", "1")
    check_form(after)
    assert after["inference_count"] - before["inference_count"] == sum(sizes)
    assert after["execution_count"] - before["execution_count"] == len(sizes)
    assert after["last_inference"] >= before["last_inference"]
    for stage in ("success", "queue", "compute_input", "compute_infer", "compute_output"):
        grown = {
            part: after["inference_stats"][stage][part] - before["inference_stats"][stage][part]
            for part in ("count", "ns")
        }
        assert grown["count"] == len(sizes), stage
        assert grown["ns"] >= 0
    assert sum(batch["compute_infer"]["count"] for batch in after["batch_stats"]) == after["execution_count"]


def test_statistics_of_every_model_and_of_none(server: Server, client: Any) -> None:
    every = client.get_inference_statistics()["model_stats"]
    assert [entry["name"] for entry in every] == ["ffn", "ffn-fp32", "mean", "mean-fp32", "slow", "slow-fp32"]
    for entry in every:
        check_form(entry)
    for path in ("/v2/models/none/stats", "/v2/models/none/config", "/v2/models/ffn/versions/9/stats"):
        status, _, data = server.ask(path)
        assert (status, set(json.loads(data))) == (404, {"error"})


def test_a_precision_shares_the_numbers_of_the_name_it_serves(client: Any) -> None:
    assert snapshot(client, "ffn")["inference_count"] == snapshot(client, "ffn-fp32")["inference_count"]
