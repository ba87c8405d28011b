"""The chaos's own parts: it would see a wrong bit, and it knows which requests were accepted."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from bench.chaos.asks import Ask, make_asks
from bench.chaos.repository import GUEST, make_repository
from bench.chaos.scene import Limits, Scene, refused, right
from bench.chaos.tally import Tally, Wrong
from bench.chaos.wire import Link, Reply

MODELS = Path(__file__).parents[2] / "models"


@pytest.fixture(scope="module")
def asks(tmp_path_factory: pytest.TempPathFactory) -> list[Ask]:
    made = make_repository(MODELS, tmp_path_factory.mktemp("chaos"), 2)
    shipped = [one for one in made if one.manifest.name == "demo-ffn"]
    return make_asks(shipped, 4, 20, 1, np.random.default_rng())


def answer_to(ask: Ask, version: str) -> Reply:
    out = ask.right[version]
    document = {
        "model_version": version,
        "outputs": [{"name": "out", "datatype": "FP32", "shape": list(ask.shape)}],
    }
    text = json.dumps(document).encode()
    return Reply(200, {"inference-header-content-length": str(len(text))}, text + out)


def test_versions_answer_differently_and_each_is_checked_against_its_own_file(asks: list[Ask]) -> None:
    for ask in (ask for ask in asks if ask.form == "binary"):
        assert ask.right.keys() == {"1", "2"}
        assert ask.right["1"] != ask.right["2"]
        for version in ask.right:
            assert right(ask)(answer_to(ask, version)) == "right"


def test_one_wrong_bit_and_an_answer_of_another_version_are_wrong(asks: list[Ask]) -> None:
    ask = next(ask for ask in asks if ask.form == "binary")
    good = answer_to(ask, "1")
    flipped = good.body[:-1] + bytes([good.body[-1] ^ 1])
    swapped = good.body.replace(b'"model_version": "1"', b'"model_version": "2"')
    for body in (flipped, swapped, good.body[:-4], b""):
        with pytest.raises(Wrong):
            right(ask)(Reply(200, good.headers, body))


@pytest.mark.parametrize(
    ("status", "headers", "body"),
    [
        (500, {}, b'{"error": "x"}'),
        (400, {}, b'{"detail": "x"}'),
        (400, {}, b"bad request"),
        (429, {}, b'{"error": "full"}'),
    ],
    ids=["undocumented", "other form", "no JSON", "no Retry-After"],
)
def test_a_refusal_in_another_form_than_the_documented_one_is_wrong(
    status: int, headers: dict[str, str], body: bytes
) -> None:
    with pytest.raises(Wrong):
        refused(400)(Reply(status, headers, body))


def test_every_500_counts_whoever_got_it_and_the_verdict_says_so() -> None:
    tally = Tally()
    assert tally.verdict == "wrong 0, lost 0, 500s 0"
    tally.see("leaver", Reply(500, {}, b""))
    assert not tally.clean
    assert tally.verdict == "wrong 0, lost 0, 500s 1"


class Sent(Link):
    """A link of stated times."""

    def __init__(self, opened: float, sent: float, answered: bool) -> None:
        self.opened, self.sent, self.answered = opened, sent, answered


def test_accepted_is_what_was_sent_whole_before_the_listener_closed_over_a_connection_that_was_taken() -> None:
    scene = Scene(0, Limits(drain_delay_s=1.0), [], [], random.Random())
    assert scene.accepted(Sent(1, 2, False))
    scene.signalled = 10.0
    assert scene.accepted(Sent(9, 10.9, False))
    assert scene.accepted(Sent(10.5, 10.9, True))
    assert not scene.accepted(Sent(10.5, 10.9, False)), "it may still be in the listener's backlog"
    assert not scene.accepted(Sent(9, 11.1, True)), "sent when the listener may be closed"


def test_the_repository_has_version_1_and_the_guest_in_the_open_and_the_rest_in_the_stage(tmp_path: Path) -> None:
    made = make_repository(MODELS, tmp_path, 3)
    shown = {(one.manifest.name, one.manifest.version) for one in made if one.served.exists()}
    assert shown == {("demo-ffn", 1), ("demo-block", 1), (GUEST, 1)}
    late = next(one for one in made if one.manifest.version == 3)
    late.show()
    assert late.folder == late.served
    late.hide()
    assert late.folder == late.staged
