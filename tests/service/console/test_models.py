"""Models as the page shows them."""

from __future__ import annotations

from pathlib import Path

from service.console.models import describe
from service.loading import load_repository
from service.settings import Settings
from tests.bundles import leave_unmeasured, memory_mean, relu_ffn, write_bundle


def test_each_name_has_a_row_with_what_its_manifest_says(tmp_path: Path) -> None:
    write_bundle(tmp_path, "ffn", relu_ffn(8, 16), precisions=("int8", "fp32"))
    write_bundle(tmp_path, "memory", memory_mean(8, 3))
    repository = load_repository(Settings(models=tmp_path, threads=1, max_window_tokens=64))
    rows = {row["name"]: row for row in describe(repository, lambda _: None)}
    assert set(rows) == {"ffn", "ffn-fp32", "ffn-int8", "memory", "memory-fp32"}
    model = rows["ffn"]["model"]
    assert (rows["ffn"]["state"], model["label"], model["precision"]) == ("READY", "ffn-int8", "int8")
    assert (model["d_in"], model["d_out"], model["d_memory"], model["window_tokens"]) == (8, 8, None, 64)
    assert (rows["memory"]["model"]["kind"], rows["memory"]["model"]["d_memory"]) == ("sequence", 3)


def test_a_model_that_does_not_run_says_why_and_one_that_is_loading_has_no_details(tmp_path: Path) -> None:
    write_bundle(tmp_path, "ffn", relu_ffn(8, 16))
    repository = load_repository(Settings(models=tmp_path, threads=1, max_window_tokens=64))
    repository.remark("later", "2", "LOADING")
    rows = {row["name"]: row for row in describe(repository, lambda _: "its trials fail")}
    assert (rows["ffn"]["state"], rows["ffn"]["reason"]) == ("FAILING", "its trials fail")
    assert (rows["later"]["version"], rows["later"]["state"], rows["later"]["model"]) == ("2", "LOADING", None)


def test_a_model_that_nobody_measured_shows_its_stand_in_s_figures(tmp_path: Path) -> None:
    leave_unmeasured(write_bundle(tmp_path, "ffn", relu_ffn(8, 16)))
    repository = load_repository(Settings(models=tmp_path, threads=1, max_window_tokens=64))
    model = describe(repository, lambda _: None)[0]["model"]
    assert (model["relative_error"], model["sqnr_db"], model["packed"]) == (0.0, 200.0, False)
    assert model["certificate"]["kind"] == "unmeasured"
