"""Malformed checkpoints: over the families, each fault is one line that says what, where and what was expected instead,
and leaves neither a bundle nor half of one.
"""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer import Typer
from typer.main import get_command

from export import ExportError, cli, pack
from export.adapters.bert import pack_bert
from export.adapters.equality import BAR, EQUALS
from export.adapters.transformers_families import FAMILIES
from export.adapters.transformers_files import pack_files
from export.adapters.vit import pack_vit
from export.packed import Packed
from tests.export.adapters.families import gpt2, llama, mixtral, switch, t5
from tests.export.checkpoint_cases import CASES, Case, bert, vit

WEIGHTS, CONFIG, INDEX = "model.safetensors", "config.json", "model.safetensors.index.json"

Change = Callable[[Path, Case], None]


def tensors(change: Callable[[dict[str, Tensor], Case], dict[str, Tensor]]) -> Change:
    def made(folder: Path, case: Case) -> None:
        changed = change(load_file(folder / WEIGHTS), case)
        save_file({name: tensor.contiguous() for name, tensor in changed.items()}, folder / "new")
        (folder / "new").rename(folder / WEIGHTS)  # the old one is mapped into memory

    return made


def weight(change: Callable[[Tensor], Tensor]) -> Change:
    return tensors(lambda all_, case: {**all_, case.weight: change(all_[case.weight])})


def embedding(change: Callable[[Tensor], Tensor]) -> Change:
    return tensors(lambda all_, case: {**all_, case.embedding: change(all_[case.embedding])})


def config(key: str, value: Any) -> Change:
    """A value for the key that a family has for `key`; None: no such key."""

    def made(folder: Path, case: Case) -> None:
        values = json.loads((folder / CONFIG).read_text())
        name = getattr(case, key)
        del values[name]
        (folder / CONFIG).write_text(json.dumps(values if value is None else {**values, name: value}))

    return made


def bytes_of(name: str, change: Callable[[bytes], bytes]) -> Change:
    def made(folder: Path, _: Case) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return made


def to_pickle(folder: Path, _: Case) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def disguised_pickle(folder: Path, case: Case) -> None:
    to_pickle(folder, case)
    (folder / "pytorch_model.bin").rename(folder / WEIGHTS)


def extra(name: str) -> Change:
    def made(all_: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
        layer = re.match(r".*?\.(?=1\.)", case.weight)
        assert layer is not None
        return {**all_, f"{layer[0]}{name}": torch.zeros(2)}

    return tensors(made)


POSITIVE = r"expected a positive integer"
# What is done to tensors and the config, and what is said; {weight} and the like are the family's own names.
FAULTS: dict[str, tuple[Change, str]] = {
    "a tensor is missing": (
        tensors(lambda all_, case: {name: t for name, t in all_.items() if name != case.weight}),
        r"(it has no tensor {weight}|layer 1 has no \S+weight)",
    ),
    "a tensor is foreign": (extra("0.adapter.weight"), r"0\.adapter\.weight (is not part of|has no place in)"),
    "a layer is missing": (extra("9.adapter.weight"), r"layers are \[.*9\], some are missing"),
    "a tensor is too narrow": (weight(lambda t: t[:, :-1]), r"{weight} has shape \(.*\), the config says \(.*\)"),
    "a tensor is a scalar": (weight(lambda t: t[0, 0]), r"{weight} has shape \(\), the config says"),
    "a tensor is empty": (weight(lambda t: t[:0]), r"{weight} has shape \(0, \d+\), the config says"),
    "a tensor holds NaN": (weight(lambda t: t * torch.nan), r"{weight} holds NaN or infinite values"),
    "a tensor holds Inf": (weight(lambda t: t.fill_(torch.inf)), r"{weight} holds NaN or infinite values"),
    "float64 too large for float32": (weight(lambda t: t.double() * 1e300), r"{weight} holds NaN or infinite values"),
    "a tensor is of integers": (weight(lambda t: t.to(torch.int8)), r"{weight} is torch\.int8, expected a floating"),
    "a tensor is of complex numbers": (weight(lambda t: t.to(torch.complex64)), r"{weight} is torch\.complex64, exp"),
    "embeddings are too narrow": (embedding(lambda t: t[..., :-1]), r"{embedding} has shape \(.*31\), expected .*32"),
    "embeddings are none": (embedding(lambda t: t[:, :0] if t.dim() == 3 else t[:0]), r"{embedding} has shape \(.*0, "),
    "embeddings are a scalar": (embedding(lambda t: t.flatten()[0]), r"{embedding} has shape \(\), expected "),
    "embeddings hold NaN": (embedding(lambda t: t * torch.nan), r"{embedding} holds NaN or infinite values"),
    "embeddings are integers": (embedding(lambda t: t.to(torch.int8)), r"{embedding} is torch\.int8, expected a float"),
    "width of another model": (config("width", 64), r"has shape \(.*32.*\), (the config says|expected) .*64"),
    "width zero": (config("width", 0), rf"config\.json: {{width}} is 0, {POSITIVE}"),
    "width absent": (config("width", None), rf"{{width}} is None, {POSITIVE}"),
    "width as text": (config("width", "32"), rf"{{width}} is '32', {POSITIVE}"),
    "width beyond all models": (config("width", 1 << 40), rf"{{width}} is {1 << 40}, {POSITIVE} up to 16777216"),
    "hidden units of another model": (config("hidden", 49), r"has shape \(.*\), the config says \(.*(49|98).*\)"),
    "heads that do not divide": (config("heads", 5), r"{odd_heads} "),
    "heads below zero": (config("heads", -4), rf"{{heads}} is -4, {POSITIVE}"),
    "more layers than there are": (config("layers", 7), r"{layers} is 7, \S+model\.safetensors has {depth} layers"),
    "fewer layers than there are": (config("layers", 1), r"{layers} is 1, \S+model\.safetensors has {depth} layers"),
    "layers beyond all models": (config("layers", 10**6), r"{layers} is 1000000, \S+ has {depth} layers"),
    "an unknown activation": (config("activation", "foo"), r"{activation} is 'foo', expected one of .*gelu"),
    "an activation that is a list": (config("activation", ["gelu"]), r"{activation} is \['gelu'\], expected one of"),
    "an epsilon that is NaN": (config("eps", float("nan")), r"{eps} is nan, expected a number between 0 and 1"),
    "an epsilon that is negative": (config("eps", -1e-5), r"{eps} is -1e-05, expected a number between 0 and 1"),
}

# What is done to whole files.
FILES: dict[str, tuple[Change, str]] = {
    "no tensors": (tensors(lambda _all, _case: {}), r"model\.safetensors: no .*tensor"),
    "other tensors": (tensors(lambda _all, _case: {"w": torch.zeros(1)}), r"model\.safetensors: no .*tensor"),
    "an empty file": (bytes_of(WEIGHTS, lambda _: b""), r"not a readable safetensors file: .*header too small"),
    "a file cut short": (bytes_of(WEIGHTS, lambda data: data[:-9]), r"not a readable safetensors file: "),
    "a file cut in its header": (bytes_of(WEIGHTS, lambda data: data[:50]), r"not a readable safetensors file: "),
    "a header of exabytes": (bytes_of(WEIGHTS, lambda data: b"\xff" * 8 + data), r"not a readable safetensors file: "),
    "a pickle": (to_pickle, r"neither model\.safetensors nor .* in it, only pytorch_model\.bin, a pickle"),
    "a pickle in disguise": (disguised_pickle, r"not a readable safetensors file: "),
    "no weights": (lambda folder, _: (folder / WEIGHTS).unlink(), r"neither model\.safetensors nor"),
    "no config": (lambda folder, _: (folder / CONFIG).unlink(), r"config\.json: No such file"),
    "a config that is empty": (bytes_of(CONFIG, lambda _: b""), r"config\.json: not JSON"),
    "a config that is cut short": (bytes_of(CONFIG, lambda data: data[:40]), r"config\.json: not JSON"),
    "a config that is no text": (bytes_of(CONFIG, lambda _: b"\xff\xfe\x00"), r"config\.json: not JSON"),
    "a config of brackets": (bytes_of(CONFIG, lambda _: b"[" * 100_000), r"config\.json: not JSON"),
    "a config that is a list": (bytes_of(CONFIG, lambda _: b"[]"), r"config\.json: expected an object"),
    "a config that is null": (bytes_of(CONFIG, lambda _: b"null"), r"config\.json: expected an object"),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders that transformers wrote, each made once."""
    root = tmp_path_factory.mktemp("written")

    def make(name: str) -> Path:
        if not (root / name).exists():
            CASES[name].make().save_pretrained(root / name)
        return root / name

    return make


class Command:
    """The command line, made once: making it costs more than refusing a file."""

    def __init__(self) -> None:
        app = Typer()
        cli.register(app)
        self.main = get_command(app).main

    def assert_refuses(self, name: str, weights: Path, folder: Path, message: str) -> None:
        models = folder / "models"
        words = ["export", name, str(weights), str(folder / CONFIG), "--name", "x", "--models", str(models)]
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as left:
            self.main(words)
        assert (left.value.code, out.getvalue()) == (1, "")
        line = err.getvalue().splitlines()[-1]
        assert line.startswith("tokenslab export: ")
        assert str(folder) in line, "it names the file"
        assert re.search(message, line), line
        assert not models.exists()


@pytest.fixture(scope="module")
def command() -> Command:
    return Command()


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        *((name, fault) for name in CASES for fault in FAULTS),
        *((name, fault) for name in ("bert", "mixtral", "t5") for fault in FILES),  # one of each reader, and in parts
    ],
)
def test_a_fault_is_named_and_leaves_nothing(
    command: Command, written: Callable[[str], Path], tmp_path: Path, name: str, fault: str
) -> None:
    case, (change, message) = CASES[name], (FAULTS | FILES)[fault]
    folder = shutil.copytree(written(name), tmp_path / "it")
    change(folder, case)
    names = {key: re.escape(str(value)) for key, value in vars(case).items()}
    command.assert_refuses(name, folder, folder, re.sub(r"\{(\w+)\}", lambda found: names[found[1]], message))


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, case in CASES.items() for key in case.more])
def test_a_family_s_own_contradictions_are_named(
    command: Command, written: Callable[[str], Path], tmp_path: Path, name: str, key: str
) -> None:
    folder = shutil.copytree(written(name), tmp_path / "it")
    value, message = CASES[name].more[key]
    values = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**values, key: value}))
    command.assert_refuses(name, folder, folder, message)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("bert", "vit")])
@pytest.mark.parametrize("value", ["falcon", []], ids=repr)
def test_a_config_of_another_family_is_named(
    command: Command, written: Callable[[str], Path], tmp_path: Path, name: str, value: Any
) -> None:
    folder = shutil.copytree(written(name), tmp_path / "it")
    values = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**values, "model_type": value}))
    command.assert_refuses(name, folder, folder, rf"model_type is {re.escape(repr(value))}, expected '")


INDEXES: dict[str, tuple[Callable[[dict[str, str]], Any], str]] = {
    "a path out of the folder": (lambda where: {**where, min(where): "../a.safetensors"}, "a file of its own folder"),
    "an absolute path": (lambda where: {**where, min(where): "/a.safetensors"}, "a file of its own folder"),
    "a missing shard": (
        lambda where: {n: "model-9.safetensors" if file == max(where.values()) else file for n, file in where.items()},
        r"model-9\.safetensors: no such file",
    ),
    "a tensor that is not in its shard": (
        lambda where: {**where, "zero": max(where.values())},
        r"zero is not in model-0000\d-of-\d+\.safetensors, where it says that it is",
    ),
    "an unlisted tensor": (
        lambda where: {name: file for name, file in where.items() if name != min(where)},
        r"it does not list \S+, which is in model-",
    ),
    "no object": (lambda _: ["a"], "weight_map is missing or is not an object"),
    "a shard that is a pickle": (lambda where: {**where, min(where): "a.bin"}, "a pickle can run any code"),
}


@pytest.mark.parametrize("fault", INDEXES)
@pytest.mark.parametrize("name", ["bert", "mixtral"])
def test_an_index_that_contradicts_its_shards_is_named(command: Command, tmp_path: Path, name: str, fault: str) -> None:
    change, message = INDEXES[fault]
    CASES[name].make().save_pretrained(tmp_path, max_shard_size="30KB")
    index = json.loads((tmp_path / INDEX).read_text())
    (tmp_path / INDEX).write_text(json.dumps({**index, "weight_map": change(index["weight_map"])}))
    command.assert_refuses(name, tmp_path, tmp_path, message)


def read(name: str, weights: Path, folder: Path, **options: Any) -> Packed:
    if name in FAMILIES:
        return pack_files(weights, folder / CONFIG, FAMILIES[name], **options)
    return {"bert": pack_bert, "vit": pack_vit}[name](weights, folder / CONFIG, **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_other_floats_are_read_as_float32_and_noted(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    CASES[name].make().to(dtype).save_pretrained(tmp_path)
    packed = read(name, tmp_path, tmp_path)
    assert {parameter.dtype for parameter in packed.module.parameters()} == {torch.float32}
    noted = packed.source["weights_dtype"]
    assert noted.startswith(str(dtype).removeprefix("torch.") + " (")
    assert noted.endswith("rounded to float32" if dtype == torch.float64 else "widened to float32")


@pytest.mark.parametrize("name", CASES)
def test_a_pickle_is_read_if_it_is_trusted_and_refused_if_not(
    command: Command, written: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    folder = shutil.copytree(written(name), tmp_path / "it")
    wanted = read(name, folder, folder)
    to_pickle(folder, CASES[name])
    pickle = folder / "pytorch_model.bin"
    command.assert_refuses(name, pickle, folder, r"a pickle can run any code .* or pass --trust-pickle")
    found = read(name, pickle, folder, trust_pickle=True)
    pairs = zip(found.module.parameters(), wanted.module.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


IN_MEMORY: dict[str, tuple[Callable[[], Any], str]] = {
    "bert": (lambda: bert().encoder, "layer.1.output.dense.weight"),
    "vit": (lambda: vit().layers[1], "mlp.fc1.weight"),
    "gpt2": (gpt2, "h.1.mlp.c_fc.weight"),
    "llama": (llama, "layers.1.mlp.up_proj.weight"),
    "mixtral": (mixtral, "layers.1.mlp.experts.gate_up_proj"),
    "t5": (t5, "encoder.block.1.layer.0.SelfAttention.q.weight"),
    "switch": (switch, "encoder.block.1.layer.1.mlp.experts.expert_1.wi.weight"),
}


@pytest.mark.parametrize("fault", ["meta", "nan", "inf", "complex"])
@pytest.mark.parametrize("name", IN_MEMORY)
def test_a_weight_in_memory_without_finite_values_is_named(name: str, fault: str) -> None:
    make, weight_name = IN_MEMORY[name]
    module = make()
    place, _, leaf = weight_name.rpartition(".")
    part = module.get_submodule(place)
    old = getattr(part, leaf).detach()
    new = {
        "meta": lambda: old.to("meta"),
        "nan": lambda: old * torch.nan,
        "inf": lambda: old.clone().fill_(torch.inf),
        "complex": lambda: old.to(torch.complex64),
    }[fault]()
    setattr(part, leaf, torch.nn.Parameter(new, requires_grad=False))
    message = {"meta": "is on the meta device", "complex": r"is torch\.complex64"}.get(fault, "holds NaN or infinite")
    with pytest.raises(ExportError, match=f"{re.escape(weight_name)} {message}"):
        pack(module)


TIED: dict[str, tuple[Callable[[], Any], str, str]] = {
    "bert": (lambda: bert().encoder, "layer.0.intermediate.dense.weight", "layer.1.intermediate.dense.weight"),
    "gpt2": (gpt2, "h.0.mlp.c_fc.weight", "h.1.mlp.c_fc.weight"),
    "llama": (llama, "layers.0.mlp.down_proj.weight", "layers.1.mlp.down_proj.weight"),
    "mixtral": (mixtral, "layers.0.mlp.gate.weight", "layers.1.mlp.gate.weight"),
    "t5": (t5, "encoder.block.0.layer.1.DenseReluDense.wo.weight", "encoder.block.1.layer.1.DenseReluDense.wo.weight"),
}


@pytest.mark.parametrize("name", TIED)
def test_weights_that_layers_share_are_proved_like_others(name: str) -> None:
    make, first, second = TIED[name]
    module = make()
    place, _, leaf = second.rpartition(".")
    setattr(module.get_submodule(place), leaf, module.get_parameter(first))
    assert pack(module).proofs[EQUALS] <= BAR
