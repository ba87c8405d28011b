"""The memory on the wire: every form becomes one packed memory per sequence, and every fault names its field."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import InvalidInput
from service.packing import Float32
from service.protocol import Decoded, Signature, decode, decode_npy
from tests.service.wire_forms import FFN, read, request

RECALL = Signature("recall", "1", 4, 4, has_sequences=True, d_memory=2)
TOKENS = np.arange(20, dtype=np.float32).reshape(5, 4)
MEMORY = np.arange(12, dtype=np.float32).reshape(6, 2)


def entry(name: str, values: Any, **change: Any) -> dict[str, Any]:
    array = np.asarray(values)
    datatype = "FP32" if array.dtype == np.float32 else "INT64"
    return {"name": name, "datatype": datatype, "shape": list(array.shape), "data": array.ravel().tolist(), **change}


def lens(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.int64)


def binary(**inputs: np.ndarray[Any, Any]) -> Decoded:
    entries = []
    for name, array in inputs.items():
        described = entry(name, array)
        del described["data"]
        entries.append({**described, "parameters": {"binary_data_size": array.nbytes}})
    head = request(*entries)
    body = head + b"".join(array.tobytes() for array in inputs.values())
    return decode(RECALL, memoryview(body), str(len(head)).encode(), 1 << 20)


def memories(got: Decoded) -> list[Float32]:
    assert got.memory is not None
    return np.split(got.memory.rows, got.memory.ends[:-1])


def test_json_and_binary_tensors_say_the_same() -> None:
    inputs = {"tokens": TOKENS, "seq_lens": lens(2, 3), "memory": MEMORY, "memory_seq_lens": lens(5, 1)}
    for got in (binary(**inputs), read(request(*(entry(*item) for item in inputs.items())), RECALL)):
        np.testing.assert_array_equal(got.tokens, TOKENS)
        assert got.seq_lens is not None
        assert got.seq_lens.tolist() == [2, 3]
        assert [rows.tolist() for rows in memories(got)] == [MEMORY[:5].tolist(), MEMORY[5:].tolist()]


def test_a_binary_memory_is_a_view_of_the_body() -> None:
    got = binary(tokens=TOKENS, memory=MEMORY)
    assert got.memory is not None
    assert not got.memory.rows.flags.owndata
    assert got.memory.seq_lens.tolist() == [6], "one sequence has all of the memory"


def test_a_batch_brings_its_memory_as_a_batch() -> None:
    tokens = np.stack([TOKENS[:2], TOKENS[2:4]])
    memory = MEMORY.reshape(2, 3, 2)
    assert [len(rows) for rows in memories(binary(tokens=tokens, memory=memory))] == [3, 3]
    padded = binary(tokens=tokens, seq_lens=lens(1, 2), memory=memory, memory_seq_lens=lens(3, 1))
    assert [rows.tolist() for rows in memories(padded)] == [memory[0].tolist(), memory[1, :1].tolist()]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4)), min_size=1, max_size=6), st.booleans())
def test_an_empty_sequence_is_dropped_with_its_memory(sequences: list[tuple[int, int]], batch: bool) -> None:
    seq_lens, memory_lens = (lens(*column) for column in zip(*sequences, strict=True))
    rng = np.random.default_rng(len(sequences))
    tokens = [rng.standard_normal((n, 4), dtype=np.float32) for n, _ in sequences]
    memory = [rng.standard_normal((m, 2), dtype=np.float32) for _, m in sequences]
    got = binary(
        tokens=padded(tokens, 4) if batch else np.concatenate(tokens),
        seq_lens=seq_lens,
        memory=padded(memory, 4) if batch else np.concatenate(memory),
        memory_seq_lens=memory_lens,
    )
    kept = [i for i, (n, _) in enumerate(sequences) if n]
    assert got.seq_lens is not None
    assert got.seq_lens.tolist() == [len(tokens[i]) for i in kept]
    assert got.memory is not None
    assert len(got.memory.ends) == len(kept)
    assert len(got.memory.rows) == sum(len(memory[i]) for i in kept)
    for rows, i in zip(memories(got) if kept else [], kept, strict=True):
        np.testing.assert_array_equal(rows, memory[i])


def padded(parts: list[Float32], longest: int) -> Float32:
    out = np.full((len(parts), longest, parts[0].shape[1]), np.nan, np.float32)
    for row, part in zip(out, parts, strict=True):
        row[: len(part)] = part
    return out


FULL = {"tokens": TOKENS, "seq_lens": lens(2, 3), "memory": MEMORY, "memory_seq_lens": lens(5, 1)}
BATCH = {"tokens": TOKENS[:4].reshape(2, 2, 4), "memory": MEMORY.reshape(2, 3, 2)}


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        pytest.param({"tokens": TOKENS}, "inputs: 'memory' is missing", id="missing"),
        pytest.param(
            FULL | {"memory_seq_lens": lens(6)}, "memory_seq_lens: 1 entries for 2 sequences", id="fewer than sequences"
        ),
        pytest.param(
            FULL | {"memory_seq_lens": lens(3, 2, 1)}, "memory_seq_lens: 3 entries for 2", id="more than sequences"
        ),
        pytest.param(FULL | {"memory_seq_lens": lens(4, 1)}, "they add up to 5, memory has 6 rows", id="sum"),
        pytest.param(FULL | {"memory_seq_lens": lens(6, 0)}, r"memory_seq_lens\[1\]: found 0.*at least 1", id="zero"),
        pytest.param(FULL | {"memory_seq_lens": lens(7, -1)}, r"memory_seq_lens\[0\]: found 7.*0 to 6", id="beyond"),
        pytest.param(FULL | {"memory": MEMORY.reshape(4, 3)}, "memory: shape .* has width 3, expected 2", id="width"),
        pytest.param(FULL | {"memory": MEMORY.ravel()}, "memory: shape .* rank 1, expected .m, d_memory", id="rank"),
        pytest.param(
            BATCH | {"memory": MEMORY}, "rank 2, expected .batch, mem, d_memory. beside tokens of rank 3", id="packed"
        ),
        pytest.param(
            BATCH | {"memory": MEMORY.reshape(3, 2, 2)}, "memory: a batch of 3, tokens has a batch of 2", id="batch"
        ),
        pytest.param(
            {k: v for k, v in FULL.items() if k != "memory_seq_lens"}, "memory_seq_lens: missing, expected 2", id="lens"
        ),
        pytest.param(FULL | {"memory": MEMORY.astype(np.int64)}, "memory: datatype 'INT64'", id="datatype"),
        pytest.param(FULL | {"memory_seq_lens": MEMORY[:1, :].ravel()}, "memory_seq_lens: datatype", id="float lens"),
        pytest.param(FULL | {"more": MEMORY}, "5 entries, expected at most 4", id="another input"),
    ],
)
def test_a_fault_names_its_field(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        binary(**inputs)


def test_a_number_that_fp32_cannot_hold_names_the_memory() -> None:
    with pytest.raises(InvalidInput, match="memory: data holds a number that FP32"):
        read(request(entry("tokens", TOKENS), entry("memory", MEMORY, data=[1e300] * 12)), RECALL)


def test_models_without_a_memory_take_none() -> None:
    with pytest.raises(InvalidInput, match=r"inputs\[1\].name: found 'memory', expected 'tokens' or 'seq_lens'"):
        read(request(entry("tokens", TOKENS), entry("memory", MEMORY)), FFN)


def test_bodies_that_hold_tokens_alone_cannot_ask_a_model_with_a_memory() -> None:
    with pytest.raises(InvalidInput, match="memory: missing, an npy body holds `tokens` alone"):
        decode_npy(RECALL, memoryview(b""), None)
    with pytest.raises(InvalidInput, match="memory: missing, a raw body"):
        decode(RECALL, memoryview(TOKENS.tobytes()), b"0", 1 << 20)


def test_no_sequences_at_all_are_no_fault() -> None:
    got = json.dumps({"inputs": [entry("tokens", TOKENS[:0]), entry("memory", MEMORY[:0])]}).encode()
    assert len(read(got, RECALL).tokens) == 0
