"""Which adapter takes a module: by class, by dotted name, by predicate; ties and duplicates are refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import export
from export import PackOptions, pack, prove_equal, register_adapter
from export.adapters import registry
from export.errors import ExportError, ProofError
from export.packed import Packed


@pytest.fixture(autouse=True)
def _adapters_of_this_test_alone() -> Iterator[None]:
    pack(nn.Linear(2, 2))  # the built-in ones
    before = dict(registry._adapters)
    yield
    registry._adapters.clear()
    registry._adapters.update(before)


class Twin(nn.Module):
    """Two Linears in a row, or `factor` times that."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.first, self.second, self.factor = nn.Linear(4, 6), nn.Linear(6, 4), factor

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(tokens))
        return out * self.factor


class Child(Twin):
    """Nearer to itself than Twin is."""


def packed(module: nn.Module, family: str) -> Packed:
    return Packed(module, "position-wise", 4, [module], 1, {"family": family})


def adapter(family: str, seen: list[PackOptions] | None = None) -> Any:
    def adapt(module: Twin, options: PackOptions) -> Packed:
        if seen is not None:
            seen.append(options)
        return packed(module, family)

    adapt.__qualname__ = family
    return adapt


@pytest.mark.parametrize(
    "target", [Twin, f"{Twin.__module__}.Twin", lambda module: isinstance(module, Twin)], ids=["class", "name", "test"]
)
def test_class_dotted_name_and_predicate_take_subclasses_too(target: Any) -> None:
    seen: list[PackOptions] = []
    register_adapter(target, accepts_causal=True)(adapter("mine", seen))
    assert pack(Child(), causal=True, seed=5).architecture["family"] == "mine"
    assert seen == [PackOptions(None, True, 5)]
    assert pack(nn.Linear(4, 4)).architecture["family"] == "module"


def test_priority_goes_before_nearness_and_nearness_before_nothing() -> None:
    register_adapter(Twin)(adapter("far"))
    register_adapter(Child)(adapter("near"))
    assert pack(Child()).architecture["family"] == "near"
    assert pack(Twin()).architecture["family"] == "far"
    register_adapter(nn.Module, priority=1)(adapter("first"))
    assert pack(Child()).architecture["family"] == "first"


def test_a_built_in_family_can_be_taken_over() -> None:
    def takeover(module: nn.Module, options: PackOptions) -> Packed:
        return packed(nn.Linear(4, 4), "taken over")

    register_adapter(nn.TransformerEncoderLayer, priority=1)(takeover)
    assert pack(nn.TransformerEncoderLayer(4, 2, 8)).architecture["family"] == "taken over"


def test_two_claims_of_equal_rank_are_refused() -> None:
    register_adapter(Twin)(adapter("one"))
    register_adapter(lambda module: type(module) is Twin)(adapter("two"))
    with pytest.raises(ExportError, match=r"Twin: .*one and .*two both take it with priority 0"):
        pack(Twin())


def test_the_same_target_twice_is_refused_unless_it_is_the_same_function() -> None:
    register_adapter(Twin)(adapter("one"))
    with pytest.raises(ExportError, match=r"Twin already has the adapter .*one with priority 0"):
        register_adapter(Twin)(adapter("two"))
    register_adapter(Twin)(adapter("one"))
    register_adapter(Twin, priority=2)(adapter("two"))
    assert pack(Twin()).architecture["family"] == "two"


@pytest.mark.parametrize("target", [3, "NoModule", "not a.name", int, None])
def test_a_target_that_is_nothing_of_the_kind_is_refused(target: Any) -> None:
    with pytest.raises(ExportError, match=r"neither an nn\.Module class"):
        register_adapter(target)
    with pytest.raises(ExportError, match="expected one or more"):
        register_adapter()


def test_options_that_do_not_suit_are_refused() -> None:
    register_adapter(Twin)(adapter("mine"))
    with pytest.raises(ExportError, match="causal: Twin has no attention"):
        pack(Twin(), causal=True)
    with pytest.raises(ExportError, match="Twin takes tokens of width 4, not 5"):
        pack(Twin(), d=5)


def test_an_adapter_that_returns_something_else_is_named() -> None:
    def forgetful(module: Twin, options: PackOptions) -> Any:
        return None

    register_adapter(Twin)(forgetful)
    with pytest.raises(ExportError, match=r"forgetful returned NoneType, expected a Packed"):
        pack(Twin())


def test_the_adapter_owns_a_float32_copy_in_eval_mode() -> None:
    def scale(module: Twin, options: PackOptions) -> Packed:
        assert not module.training
        assert module.first.weight.dtype == torch.float32
        return packed(module, "mine")

    register_adapter(Twin)(scale)
    module = Twin().double().train()
    assert pack(module).module is not module


@pytest.mark.parametrize("factor", [1.0, 1 + 1e-9, float("nan")])
def test_equality_is_proved_or_refused(factor: float) -> None:
    original, other = Twin(factor), Twin()
    other.load_state_dict(original.state_dict())
    made = replace(packed(other, "mine"), proofs={"before": 0.0})
    if factor == 1.0:
        proofs = prove_equal(original, made).proofs
        assert list(proofs) == ["before", "equals the original module, per sequence"]
        assert max(proofs.values()) < 1e-14
    else:
        with pytest.raises(ProofError, match=r"Twin does not compute what its weights say.*; say why"):
            prove_equal(original, made, hint="say why")
    assert {p.dtype for p in [*original.parameters(), *other.parameters()]} == {torch.float32}


def test_an_original_or_packed_form_that_fails_is_an_export_error() -> None:
    with pytest.raises(ExportError, match=r"Twin failed in float64: RuntimeError"):
        prove_equal(Twin(), packed(Twin(), "mine"), one_sequence=lambda rows: Twin()(rows))
    with pytest.raises(ExportError, match=r"the packed Twin failed in float64: RuntimeError"):
        prove_equal(Twin(), replace(packed(Twin(), "mine"), layers=[]))
    with pytest.raises(ProofError, match=r"Twin gives \(3, 4\), its packed form \(3, 6\)"):
        prove_equal(Twin(), packed(nn.Linear(4, 6), "mine"))


def test_public_names_are_there_and_load_torch_only_when_used() -> None:
    for name in export.__all__:
        assert getattr(export, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = export.nothing
    code = "import sys, export; assert 'torch' not in sys.modules; from export import register_adapter"
    code += "; assert 'torch' in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
