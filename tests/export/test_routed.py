"""Routing margins: noise that cannot flip a token leaves it in the parity figure, flips are counted apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from export.parity import measure
from export.reference import Case, read_references, write_reference
from export.routed import RoutedLayer, compare_routing, expert_loads, with_margin
from service.errors import BundleError
from service.manifest import Routing
from tests.export.hand_built import linear, opened, run


def layer(logits: object, top_k: int = 1) -> RoutedLayer:
    return RoutedLayer(np.array(logits, np.float64), top_k)


def routing(margin: float) -> Routing:
    return Routing(noise=margin / 4, margin=margin, tokens=1, without_margin=0, flipped=0, flipped_with_margin=0)


def test_the_margin_is_between_the_last_chosen_and_the_first_that_was_not() -> None:
    logits = [[1, 5, 3, 2], [4, 4, 4, 4], [9, 0, 7, 8]]
    assert layer(logits, 1).margins.tolist() == [2, 0, 1]
    assert layer(logits, 2).margins.tolist() == [1, 0, 1]
    assert layer(logits, 4).margins.tolist() == [np.inf] * 3
    assert layer(logits, 2).chosen.tolist() == [[1, 2], [0, 1], [0, 3]]


def test_noise_and_flips_are_measured_without_what_all_experts_share() -> None:
    rng = np.random.default_rng()
    clean, noise = rng.standard_normal((2000, 8)), rng.standard_normal((2000, 8))
    noisy = clean + 0.05 * noise + rng.standard_normal((2000, 1))
    (found,) = compare_routing([[layer(clean, 2)]], [[noisy]])
    assert found.noise == pytest.approx(0.05 * (7 / 8) ** 0.5, rel=0.05)
    assert found.margin == pytest.approx(4 * 2**0.5 * found.noise)
    before, after = np.sort(layer(clean, 2).chosen, 1), np.sort(layer(noisy, 2).chosen, 1)
    flips = (before != after).any(1)
    assert found.flipped == flips.sum() > 0
    assert found.flipped_with_margin <= 2
    assert found.without_margin == (layer(clean, 2).margins <= found.margin).sum() < 1000


def test_the_order_of_a_tokens_experts_is_no_flip() -> None:
    (found,) = compare_routing([[layer([[2, 1, -9]], 2)]], [[np.array([[1.0, 2, -9]])]])
    assert found.flipped == 0


def test_a_token_counts_if_it_has_a_margin_at_every_router() -> None:
    layers = [layer([[0, 3], [0, 3], [0, 1]]), layer([[0, 3], [0, 1], [0, 3]])]
    assert with_margin(layers, [routing(2), routing(2)], 3).tolist() == [True, False, False]
    assert with_margin(layers, [routing(2), routing(0.5)], 3).tolist() == [True, True, False]
    assert with_margin([], [], 2).all()


def test_load_is_a_share_for_each_expert_also_for_those_without_tokens() -> None:
    first, second = expert_loads(
        [[layer([[2, 1, 0]], 2), layer([[0, 0, 5]])], [layer([[2, 1, 0]], 2), layer([[0, 0, 5]])]]
    )
    assert first.shares == [0.5, 0.5, 0]
    assert first.entropy_bits == 1
    assert (second.shares, second.entropy_bits) == ([0, 0, 1], 0)


def test_parity_is_measured_over_the_tokens_with_a_margin(tmp_path: Path) -> None:
    weight = np.random.default_rng().standard_normal((4, 4)).astype(np.float32)
    session = opened(linear(weight, np.zeros(4, np.float32)), tmp_path / "linear.onnx")
    tokens = np.random.default_rng().standard_normal((3, 4), dtype=np.float32)
    reference = run(session, tokens).astype(np.float64)
    reference[1] += 1  # as if this token had been sent elsewhere
    case = Case(tokens, (3,), reference, routed=(layer([[0, 9], [0, 0.1], [9, 0]]),))
    (row,) = measure(session, [case], [routing(1)])
    assert row.relative_error == 0
    (row,) = measure(session, [case], [routing(0.01)])
    assert row.relative_error > 0.1
    with pytest.raises(
        Exception, match=r"only 0% of the tokens have a margin that the noise at the routers \(2.5e\+00"
    ):
        measure(session, [case], [routing(10)])


def test_a_case_whose_tokens_all_lack_a_margin_has_no_figure(tmp_path: Path) -> None:
    session = opened(linear(np.eye(2, dtype=np.float32), np.zeros(2, np.float32)), tmp_path / "linear.onnx")
    near = Case(np.ones((1, 2), np.float32), (1,), np.zeros((1, 2)), routed=(layer([[0, 0]]),))
    far = Case(np.ones((2, 2), np.float32), (2,), np.ones((2, 2)), routed=(layer([[0, 9]] * 2),))
    assert [row.seq_lens for row in measure(session, [near, far], [routing(1)])] == [[2]]


def test_logits_travel_with_the_bundle_so_that_verify_needs_no_torch(tmp_path: Path) -> None:
    tokens = np.ones((2, 3), np.float32)
    layers = (layer([[0.25, 1, 2], [3, 4, 5]], 2), layer([[1, 0], [0, 1]]))
    write_reference(tmp_path / "reference.npz", [Case(tokens, (2,), tokens.astype(np.float64), routed=layers)])
    (read,) = read_references(tmp_path / "reference.npz")
    assert [found.top_k for found in read.routed] == [2, 1]
    for found, written in zip(read.routed, layers, strict=True):
        assert np.array_equal(found.logits, written.logits)


def test_a_reference_without_the_logits_it_should_have_is_refused(tmp_path: Path) -> None:
    arrays: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]] = {
        "tokens_0": np.ones((1, 2), np.float32),
        "out_0": np.ones((1, 2)),
        "top_k_0_0": np.array(1),
    }
    np.savez(tmp_path / "reference.npz", allow_pickle=False, **arrays)
    with pytest.raises(BundleError, match="no array 'logits_0_0'"):
        read_references(tmp_path / "reference.npz")
