"""A pipeline without Ray: the front, real stages in this process, and replicas that die when they are told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploy.ray import front
from deploy.ray.front import Front
from deploy.ray.line import Line, find_line
from deploy.ray.stage import Ask, Stage
from service.errors import BundleError, RequestError
from service.manifest import MANIFEST, Manifest, read_manifest
from service.manifest import Stage as StageNote
from service.request import Answer
from service.settings import Settings
from tests.bundles import relu_ffn, sequence_mean, write_bundle

D = 8


class ReplicaDied(Exception):
    """What Ray would raise."""


def write_stages(models: Path, count: int = 2) -> None:
    """`whole` in stages that differ, so that their order shows."""
    for index in range(1, count + 1):
        name = f"whole-stage{index}of{count}"
        write_bundle(models, name, relu_ffn(D, 2 * D, seed=index))
        note = StageNote(
            of="whole",
            index=index,
            count=count,
            first_layer=index,
            last_layer=index,
            whole={"fp32-cpu.onnx": "0" * 64},
            windows_compared=1,
        )
        restate(models / name, stage=note)


def restate(bundle: Path, **update: Any) -> None:
    path = bundle / "1" / MANIFEST
    manifest = Manifest.model_validate_json(path.read_bytes()).model_copy(update=update)
    path.write_text(manifest.model_dump_json())


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    write_stages(tmp_path)
    return Settings(models=tmp_path, threads=1)


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    def run(settings: Settings) -> None:
        asyncio.run(asyncio.wait_for(test(settings), 30))

    return run


@contextmanager
def no_pause() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(front, "PAUSE_S", 0.0)
        yield


class Row:
    """The stages of a line, and a front that asks them; `deaths` replicas die first, at the last stage."""

    def __init__(self, settings: Settings, deaths: int = 0) -> None:
        self.line: Line = find_line(settings, "whole", 1)
        self.stages = [Stage(settings, manifest.name, 1) for manifest in self.line.stages]
        self.deaths = deaths
        self.asked: list[str] = []
        self.app = Front(self.line, [self._asking(stage) for stage in self.stages], settings, (ReplicaDied,))

    def _asking(self, stage: Stage) -> Callable[[str, Ask], Awaitable[Answer | RequestError]]:
        async def ask(model: str, given: Ask) -> Answer | RequestError:
            self.asked.append(model)
            if self.deaths and stage is self.stages[-1]:
                self.deaths -= 1
                raise ReplicaDied
            return await stage.infer(model, given)

        return ask

    async def get(self, path: str, body: bytes = b"", method: str = "GET") -> tuple[int, Any]:
        said: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            said.append(message)

        headers = [(b"content-length", b"%d" % len(body))]
        scope = {"type": "http", "path": path, "method": method, "headers": headers, "query_string": b""}
        await self.app(scope, receive, send)
        return said[0]["status"], json.loads(b"".join(message.get("body", b"") for message in said[1:]))

    async def infer(self, tokens: Any, model: str = "whole") -> tuple[int, Any]:
        data = {"name": "tokens", "datatype": "FP32", "shape": list(tokens.shape), "data": tokens.ravel().tolist()}
        return await self.get(f"/v2/models/{model}/infer", json.dumps({"inputs": [data]}).encode(), "POST")

    async def close(self) -> None:
        for stage in self.stages:
            await stage.close()


def expected(row: Row, tokens: Any) -> list[float]:
    for stage in row.stages:
        tokens = stage._models["whole-stage1of2" if stage is row.stages[0] else "whole-stage2of2"].run(tokens, None)
    values: list[float] = tokens.ravel().tolist()
    return values


def random_tokens(rows: int) -> Any:
    return np.random.default_rng().standard_normal((rows, D), dtype=np.float32)


@in_loop
async def test_tokens_pass_through_every_stage_in_its_order(settings: Settings) -> None:
    row = Row(settings)
    tokens = random_tokens(5)
    status, answer = await row.infer(tokens)
    assert status == 200
    assert np.array(answer["outputs"][0]["data"], np.float32).tolist() == expected(row, tokens)
    assert row.asked == ["whole-stage1of2-fp32", "whole-stage2of2-fp32"]
    assert (await row.infer(tokens, "whole-fp32"))[0] == 200
    assert await row.infer(random_tokens(0)) == (
        200,
        answer | {"outputs": [{**answer["outputs"][0], "shape": [0, D], "data": []}]},
    )
    await row.close()


@in_loop
async def test_a_request_whose_replica_dies_is_asked_again_and_answered(settings: Settings) -> None:
    row = Row(settings, deaths=front.ATTEMPTS - 1)
    tokens = random_tokens(3)
    with no_pause():
        status, answer = await row.infer(tokens)
    assert status == 200
    assert np.array(answer["outputs"][0]["data"], np.float32).tolist() == expected(row, tokens)
    assert row.asked.count("whole-stage1of2-fp32") == 1, "what a stage has answered is not computed again"
    retries = row.app._registry.get_sample_value("tokenslab_front_retries_total", {"stage": "whole-stage2of2-fp32"})
    assert retries == front.ATTEMPTS - 1
    await row.close()


@in_loop
async def test_replicas_that_die_without_end_are_a_503_that_says_so(settings: Settings) -> None:
    row = Row(settings, deaths=front.ATTEMPTS)
    with no_pause():
        status, answer = await row.infer(random_tokens(3))
    assert status == 503
    assert "5 replicas were lost" in answer["error"]
    await row.close()


@in_loop
async def test_a_fault_of_the_request_keeps_its_status_through_a_stage(settings: Settings) -> None:
    row = Row(settings.model_copy(update={"max_queue_tokens": 4}))
    status, answer = await row.infer(random_tokens(5))
    assert status == 413
    assert "Traceback" not in answer["error"]
    assert (await row.get("/v2/models/other/infer", b"{}", "POST"))[0] == 404
    assert (await row.get("/v2/models/whole/versions/2/infer", b"{}", "POST"))[0] == 404
    assert (await row.get("/v2/models/whole/infer"))[0] == 405
    assert (await row.get("/v2/nothing"))[0] == 404
    await row.close()


@in_loop
async def test_a_stage_that_does_not_answer_in_time_is_a_504(settings: Settings) -> None:
    row = Row(settings.model_copy(update={"timeout_s": 0.05}))

    async def never(_: str, __: Ask) -> Answer | RequestError:
        await asyncio.sleep(20)
        raise AssertionError

    row.app._stages = [never, never]
    assert (await row.infer(random_tokens(1)))[0] == 504
    await row.close()


@in_loop
async def test_health_and_metadata_are_told(settings: Settings) -> None:
    row = Row(settings)
    assert await row.get("/v2/health/live") == (200, {"live": True})
    assert await row.get("/v2/health/ready") == (200, {"ready": True})
    assert (await row.get("/v2"))[1]["models"] == ["whole-fp32", "whole"]
    assert (await row.get("/v2/models/whole/ready"))[0] == 200
    status, told = await row.get("/v2/models/whole")
    assert status == 200
    assert told["inputs"] == [{"name": "tokens", "datatype": "FP32", "shape": [-1, D]}]
    assert told["parameters"] == {"stages": ["whole-stage1of2-fp32", "whole-stage2of2-fp32"]}
    await row.close()


def test_a_bundle_that_was_not_cut_is_a_line_of_one(tmp_path: Path) -> None:
    write_bundle(tmp_path, "mean", sequence_mean(D))
    assert [stage.name for stage in find_line(Settings(models=tmp_path), "mean", 1).stages] == ["mean"]


def test_a_line_that_is_not_whole_is_refused_with_the_stage(tmp_path: Path) -> None:
    write_stages(tmp_path, 3)
    settings = Settings(models=tmp_path)
    note = read_manifest(tmp_path / "whole-stage2of3" / "1").stage
    assert note is not None
    restate(tmp_path / "whole-stage2of3", stage=note.model_copy(update={"whole": {"fp32-cpu.onnx": "1" * 64}}))
    with pytest.raises(BundleError, match="whole-stage2of3: it was cut from another export"):
        find_line(settings, "whole", 1)
    (tmp_path / "whole-stage2of3" / "1").rename(tmp_path / "whole-stage2of3" / "2")
    with pytest.raises(BundleError, match="stage 2 of 3 is missing"):
        find_line(settings, "whole", 1)


def test_a_stage_that_is_not_there_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no such version"):
        Stage(Settings(models=tmp_path), "whole", 1)
