"""Settings: read from the environment, frozen, and a wrong one is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from service.cpu import cpu_quota
from service.settings import Settings


def test_the_environment_sets_what_no_flag_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENSLAB_MAX_WAIT_MS", "2.5")
    monkeypatch.setenv("TOKENSLAB_PACK_TOLERANCE", "a, b")
    settings = Settings(port=1)
    assert (settings.max_wait_ms, settings.port) == (2.5, 1)
    assert settings.pack_tolerance == {"a", "b"}


def test_a_setting_out_of_range_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENSLAB_MAX_WINDOW_TOKENS", "0")
    with pytest.raises(ValidationError, match="max_window_tokens"):
        Settings()


def test_a_misspelt_variable_is_named_and_not_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENSLAB_MAX_WAIT", "1")
    with pytest.raises(ValidationError, match="TOKENSLAB_MAX_WAIT is no setting"):
        Settings()


@pytest.mark.parametrize(
    ("name", "value"),
    [("TOKENSLAB_PORT", "tcp://10.0.0.7:8000"), ("TOKENSLAB_SERVICE_HOST", "10.0.0.7"), ("TOKENSLAB_PORT_80_TCP", "x")],
)
def test_what_kubernetes_sets_for_a_service_of_this_name_is_explained(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValidationError, match="enableServiceLinks: false"):
        Settings()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("host", ""),
        ("max_window_tokens", 10**12),
        ("max_sequence_tokens", 10**12),
        ("threads", 10**5),
        ("max_queue_tokens", 1 << 64),  # orjson refuses it: /config was a 500
        ("max_priority_tokens", f"1,1,{1 << 64}"),
        ("keep_alive_s", 10**6),
    ],
)
def test_a_value_that_no_machine_has_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValidationError, match=name):
        Settings.model_validate({name: value})


@pytest.mark.parametrize("name", ["timeout_s", "max_body_mib", "drain_limit_s", "max_wait_ms"])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1.0])
def test_a_number_that_is_none_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValidationError, match=name):
        Settings.model_validate({name: value})


def test_all_bodies_together_have_room_for_the_largest() -> None:
    with pytest.raises(ValidationError, match=r"max_bodies_mib: 1\.0 is less than max_body_mib, 160\.0"):
        Settings(max_bodies_mib=1)


def test_settings_cannot_change_under_a_running_service() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        setattr(Settings(), "port", 1)  # noqa: B010 - mypy already knows


def test_threads_default_to_the_quota() -> None:
    assert Settings().threads == cpu_quota()


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "100000 100000"}, 1),
        ({"cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "10000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
    ],
)
def test_the_containers_quota_bounds_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_quota(tmp_path) == cores


@pytest.mark.parametrize("files", [{}, {"cpu.max": "max 100000"}, {"cpu/cpu.cfs_quota_us": "-1"}])
def test_without_a_quota_the_affinity_mask_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_quota(tmp_path) == 3


def test_a_collectors_address_holds_no_credentials_and_no_error_shows_them() -> None:
    with pytest.raises(ValidationError, match="OTEL_EXPORTER_OTLP_HEADERS") as raised:
        Settings(otlp_endpoint="https://me:secret@collector/v1/traces")
    assert "secret" not in str(raised.value)
