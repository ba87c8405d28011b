"""Loading: what is served under which name, and that a bundle which cannot be trusted is named and not served."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from service.errors import BundleError, NotFound
from service.loading import load_repository
from service.manifest import MANIFEST
from service.model import Model
from service.repository import Repository
from service.settings import Settings
from tests.bundles import leave_unmeasured, memory_mean, relu_ffn, sequence_mean, write_bundle


def load(models: Path, **settings: Any) -> Repository:
    return load_repository(Settings(models=models, threads=1, max_window_tokens=64, **settings))


def edit_manifest(folder: Path, **change: Any) -> None:
    path = folder / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def test_a_bundle_is_served_under_its_name_and_under_each_precisions(tmp_path: Path) -> None:
    write_bundle(tmp_path, "ffn", relu_ffn(8, 16), precisions=("int8", "fp32"))
    repository = load(tmp_path)
    assert [name for name, _ in repository] == ["ffn", "ffn-fp32", "ffn-int8"]
    assert repository.get("ffn") is repository.get("ffn-int8"), "one model, so that its requests share windows"
    assert repository.get("ffn-fp32").variant.precision == "fp32"


def test_a_model_whose_report_was_edited_is_served(tmp_path: Path) -> None:
    """Nothing that runs comes from it; `tokenslab verify` names it."""
    folder = write_bundle(tmp_path, "ffn", relu_ffn(8, 16))
    (folder / "report.md").write_text("edited")
    edit_manifest(folder, report_sha256={"report.md": "0" * 64, "report.json": "0" * 64})
    assert [name for name, _ in load(tmp_path)] == ["ffn", "ffn-fp32"]


def test_the_latest_version_is_served_by_default_and_all_on_request(tmp_path: Path) -> None:
    for version in (2, 10):
        write_bundle(tmp_path, "ffn", relu_ffn(8, 16, seed=version), version=version)
    assert [(n, m.version) for n, m in load(tmp_path)] == [("ffn", "10"), ("ffn-fp32", "10")]
    both = load(tmp_path, versions="all")
    assert both.get("ffn").version == "10"
    assert both.get("ffn", "2").version == "2"
    assert both.versions("ffn") == ("2", "10")


def test_a_precision_that_only_some_versions_have_is_served_in_those(tmp_path: Path) -> None:
    write_bundle(tmp_path, "ffn", relu_ffn(8, 16), version=1, precisions=("fp32", "int8"))
    write_bundle(tmp_path, "ffn", relu_ffn(8, 16), version=2, precisions=("fp32",))
    repository = load(tmp_path, versions="all")
    assert repository.versions("ffn-int8") == ("1",)
    assert repository.get("ffn-int8").version == "1"
    assert repository.get("ffn").version == "2"


def test_an_unknown_model_or_version_says_what_there_is(tmp_path: Path) -> None:
    write_bundle(tmp_path, "ffn", relu_ffn(8, 16))
    repository = load(tmp_path)
    with pytest.raises(NotFound, match="unknown model 'x'; served: ffn, ffn-fp32"):
        repository.get("x")
    with pytest.raises(NotFound, match="'ffn' has no version '7' here; served: 1"):
        repository.get("ffn", "7")


def test_names_that_clash_are_an_error(tmp_path: Path) -> None:
    write_bundle(tmp_path, "ffn", relu_ffn(8, 16))
    write_bundle(tmp_path, "ffn-fp32", relu_ffn(8, 16))
    with pytest.raises(BundleError, match=r"model 'ffn-fp32' clashes with one of .*ffn"):
        load(tmp_path)


def test_an_export_under_way_is_not_a_version(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path, "ffn", relu_ffn(8, 16))
    (folder.parent / ".2.tmp").mkdir()
    assert len(list(load(tmp_path))) == 2


def test_names_that_clash_across_versions_are_an_error_too(tmp_path: Path) -> None:
    write_bundle(tmp_path, "ffn", relu_ffn(8, 16), version=1)
    write_bundle(tmp_path, "ffn-fp32", relu_ffn(8, 16), version=2)
    with pytest.raises(BundleError, match="clashes"):
        load(tmp_path)


def test_warming_up_runs_no_longer_sequence_than_a_request_may_have(tmp_path: Path) -> None:
    seen: list[list[int]] = []
    run = Model.run

    def spy(model: Model, tokens: Any, seq_lens: Any, memory: Any) -> Any:
        seen.append(seq_lens.tolist())
        return run(model, tokens, seq_lens, memory)

    write_bundle(tmp_path, "mean", sequence_mean(4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Model, "run", spy)
        load(tmp_path, max_sequence_tokens=30)
        assert [30, 30, 4] in seen
        seen.clear()
        load(tmp_path, max_sequence_tokens=100)
    assert [64] in seen or [100] in seen
    assert max(map(max, seen)) == 100


def test_a_model_s_own_longest_sequence_bounds_its_warm_up_and_its_requests(tmp_path: Path) -> None:
    """A rotary table has an end: what is beyond is refused at the door, not by the window that others share."""
    write_bundle(tmp_path, "mean", sequence_mean(8))
    edit_manifest(tmp_path / "mean" / "1", max_sequence_tokens=5)
    seen: list[int] = []
    run = Model.run

    def spy(model: Model, tokens: Any, seq_lens: Any, memory: Any) -> Any:
        seen.append(int(seq_lens.max()))
        return run(model, tokens, seq_lens, memory)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Model, "run", spy)
        model = load(tmp_path, max_sequence_tokens=100).get("mean")
    assert model.limits.sequence_tokens == 5
    assert max(seen) == 5


def test_a_model_with_a_memory_is_warmed_and_tried_with_one(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path, "recall", memory_mean(4, 6))
    model = load(tmp_path).get("recall")
    assert model.memory_slab is not None
    assert model.memory_slab.shape == (64, 6)
    edit_manifest(folder, d_memory=None)
    with pytest.raises(BundleError, match=r"its inputs are .*memory_seq_lens"):
        load(tmp_path)
    edit_manifest(folder, d_memory=6, kind="position-wise")
    with pytest.raises(BundleError, match="d_memory: a memory belongs to a sequence"):
        load(tmp_path)


@pytest.mark.parametrize("coupled", ["tokens", "memory"])
def test_a_model_whose_sequences_feel_their_neighbours_memory_is_not_served(tmp_path: Path, coupled: str) -> None:
    write_bundle(tmp_path, "recall", memory_mean(4, 6, coupled=coupled))
    with pytest.raises(BundleError, match="its certificate says exact, but not on this machine: sequence 0"):
        load(tmp_path)


@pytest.mark.parametrize("stray", ["v2", "02", "٣"])
def test_a_stray_folder_is_named(tmp_path: Path, stray: str) -> None:
    folder = write_bundle(tmp_path, "ffn", relu_ffn(8, 16))
    (folder.parent / stray).mkdir()
    with pytest.raises(BundleError, match="not a version folder"):
        load(tmp_path)


def test_no_repository_and_an_empty_one_are_errors(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="not a folder"):
        load(tmp_path / "none")
    with pytest.raises(BundleError, match="no bundle in it"):
        load(tmp_path)


@pytest.mark.parametrize("below", ["ffn", "ffn/1"])
def test_a_bundle_given_as_the_repository_is_told_from_one(tmp_path: Path, below: str) -> None:
    write_bundle(tmp_path, "ffn", relu_ffn(8, 16))
    with pytest.raises(BundleError, match=rf"a bundle, not a model repository; did you mean {tmp_path}\?"):
        load(tmp_path / below)


def test_a_corrupted_file_is_named_with_both_hashes(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path, "ffn", relu_ffn(8, 16))
    octets = bytearray((folder / "fp32.onnx").read_bytes())
    octets[len(octets) // 2] ^= 1
    (folder / "fp32.onnx").write_bytes(octets)
    with pytest.raises(BundleError, match=r"fp32\.onnx: its SHA-256 is [0-9a-f]{64}, the manifest says [0-9a-f]{64}"):
        load(tmp_path)


def test_a_missing_variant_is_named(tmp_path: Path) -> None:
    (write_bundle(tmp_path, "ffn", relu_ffn(8, 16)) / "fp32.onnx").unlink()
    with pytest.raises(BundleError, match=r"fp32\.onnx: No such file"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d_in": "wide"}, "d_in"),
        ({"kind": "other"}, "kind"),
        ({"surplus": 1}, "surplus"),
        ({"parameters": 1 << 64}, "parameters"),
        ({"max_sequence_tokens": 1 << 64}, "max_sequence_tokens"),
        ({"variants": []}, "variants"),
        ({"default_precision": "int8"}, "no variant has precision 'int8'"),
        ({"name": "other"}, "it describes other/1, its folder is ffn/1"),
        ({"d_in": 9}, "its inputs are"),
        ({"d_out": 9}, "out is"),
        ({"kind": "sequence"}, "its inputs are"),
    ],
)
def test_a_manifest_that_does_not_match_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    edit_manifest(write_bundle(tmp_path, "ffn", relu_ffn(8, 16)), **change)
    with pytest.raises(BundleError, match=message):
        load(tmp_path)


def test_a_manifest_that_is_no_json_is_named(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path, "ffn", relu_ffn(8, 16))
    (folder / MANIFEST).write_text("{")
    with pytest.raises(BundleError, match=r"manifest\.json: document"):
        load(tmp_path)


def test_a_file_that_is_no_onnx_is_named(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path, "ffn", relu_ffn(8, 16))
    (folder / "fp32.onnx").write_bytes(b"not onnx")
    import hashlib

    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["variants"][0]["sha256"] = hashlib.sha256(b"not onnx").hexdigest()
    edit_manifest(folder, **manifest)
    with pytest.raises(BundleError, match=r"fp32\.onnx: ONNX Runtime cannot load it"):
        load(tmp_path)


def test_a_provider_that_the_bundle_has_no_variant_for_is_refused(tmp_path: Path) -> None:
    write_bundle(tmp_path, "ffn", relu_ffn(8, 16))
    with pytest.raises(BundleError, match="no variant for provider 'cuda'"):
        load(tmp_path, provider="cuda")


def coupled(d: int) -> onnx.ModelProto:
    """Each row plus the mean of the whole window: what dynamic quantization does to a batch, only louder."""
    from onnx import helper

    model = relu_ffn(d, 2 * d)
    model.graph.node[-1].output[0] = "alone"
    model.graph.node.append(helper.make_node("ReduceMean", ["alone"], ["mean"], keepdims=1))
    model.graph.node.append(helper.make_node("Add", ["alone", "mean"], ["out"]))
    return model


def test_a_certificate_that_does_not_hold_on_this_machine_keeps_the_service_down(tmp_path: Path) -> None:
    write_bundle(tmp_path, "coupled", coupled(8))
    with pytest.raises(BundleError, match="its certificate says exact, but not on this machine"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("certificate", "settings", "packed"),
    [
        ("exact", {}, True),
        ("exact", {"windows": False}, False),
        ("tolerance", {}, False),
        ("tolerance", {"pack_tolerance": frozenset({"ffn"})}, True),
        ("tolerance", {"pack_dependent": frozenset({"ffn"})}, False),
        ("dependent", {}, False),
        ("dependent", {"pack_tolerance": frozenset({"ffn"})}, False),
        ("dependent", {"pack_dependent": frozenset({"other"})}, False),
        ("dependent", {"pack_dependent": frozenset({"ffn"})}, True),
        ("dependent", {"pack_dependent": frozenset({"ffn"}), "windows": False}, False),
    ],
)
def test_only_exact_models_are_packed_unless_their_owner_accepts_the_drift(
    tmp_path: Path, certificate: str, settings: dict[str, Any], packed: bool
) -> None:
    write_bundle(tmp_path, "ffn", relu_ffn(8, 16), certificate=certificate)
    limits = load(tmp_path, **settings).get("ffn").limits
    assert (limits.requests is None) == packed
    # Whoever accepts that neighbours change answers has not accepted that a request's own rows are torn apart.
    assert limits.divisible == (packed and certificate != "dependent")


@pytest.mark.parametrize("file", [MANIFEST, "fp32.onnx"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.timeout(20)
def test_what_is_no_regular_file_is_named_and_neither_waited_for_nor_read_without_end(
    tmp_path: Path, file: str, kind: str
) -> None:
    path = write_bundle(tmp_path, "ffn", relu_ffn(8, 16)) / file
    path.unlink()
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case _:
            path.mkdir()
    with pytest.raises(BundleError, match=rf"{file}.*(not a regular file|directory)"):
        load(tmp_path)


def test_a_manifest_without_end_is_refused_by_its_size(tmp_path: Path) -> None:
    path = write_bundle(tmp_path, "ffn", relu_ffn(8, 16)) / MANIFEST
    with path.open("r+b") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(BundleError, match=r"manifest\.json: more than \d+ bytes"):
        load(tmp_path)


def test_an_unmeasured_model_is_never_packed(tmp_path: Path) -> None:
    leave_unmeasured(write_bundle(tmp_path, "ffn", relu_ffn(8, 16)))
    accepted = {"pack_tolerance": frozenset({"ffn"}), "pack_dependent": frozenset({"ffn"})}
    model = load(tmp_path, **accepted).get("ffn")
    assert (model.certificate.kind, model.limits.requests, model.limits.divisible) == ("unmeasured", 1, False)


def test_a_model_runs_what_its_signature_says(tmp_path: Path) -> None:
    write_bundle(tmp_path, "mean", sequence_mean(4))
    model = load(tmp_path).get("mean")
    tokens = np.arange(12, dtype=np.float32).reshape(3, 4)
    out = model.run(tokens, np.array([1, 2]))
    np.testing.assert_allclose(out[0], 2 * tokens[0])
    np.testing.assert_allclose(out[1:], tokens[1:] + tokens[1:].mean(0))
