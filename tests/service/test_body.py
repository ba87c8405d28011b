"""Bodies and their common budget, without a server."""

from __future__ import annotations

import asyncio
import gzip
from typing import Any

import pytest

from service.body import BodyBudget, BodyLimits, RequestBody
from service.errors import BodiesFull, InvalidInput

LIMITS = BodyLimits(1000, 5.0, "max_body_mib")


def body(budget: BodyBudget, *chunks: bytes) -> RequestBody:
    waiting = list(chunks)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": waiting.pop(0), "more_body": bool(waiting)}

    return RequestBody(receive, budget)


def test_a_body_counts_until_it_is_released_whatever_became_of_it() -> None:
    budget = BodyBudget(100)
    first, second = body(budget, b"a" * 40, b"b" * 30), body(budget, b"c" * 20, b"d" * 20)
    assert bytes(asyncio.run(first.read(70, LIMITS))) == b"a" * 40 + b"b" * 30
    assert budget.taken == 70
    with pytest.raises(BodiesFull, match="20 more would exceed max_bodies_mib, 100"):
        asyncio.run(second.read(40, LIMITS))
    second.release()
    assert budget.taken == 70
    first.release()
    assert budget.taken == 0


@pytest.mark.parametrize("sent", [gzip.compress(b"x" * 500), b"no gzip"], ids=["gzip", "no-gzip"])
def test_inflating_while_slow_answers_overdraw_the_budget_gives_back_what_it_took(sent: bytes) -> None:
    budget = BodyBudget(1200)
    slow, new = body(budget), body(budget)

    async def inflate_beside_a_slow_answer() -> None:
        inflating = asyncio.ensure_future(new.inflate(memoryview(sent), "gzip", LIMITS))
        await asyncio.sleep(0)
        slow.charge(5000)
        try:
            await inflating
        finally:
            assert budget.taken == 5000

    with pytest.raises((InvalidInput, BodiesFull)):
        asyncio.run(inflate_beside_a_slow_answer())
    new.release()
    slow.release()
    assert budget.taken == 0
