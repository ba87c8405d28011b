"""What adapters of transformers' decoders and encoders share. Only for a module that came from there is it imported.

transformers widens to float32 by hand (norms, softmax, rotary angles) also where that narrows float64: the proof runs
its own forward with those steps left in float64, so that equality is a matter of 1e-15, not of float32's 1e-7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from export.adapters.parts import packing
from export.blocks.ffn import Activation
from export.errors import ExportError
from export.packed import Sampler
from service.packing import Float32

# config.hidden_act and its like -> (plain, gated)
_ACTIVATIONS: Final[Mapping[str, tuple[str, str | None]]] = {
    "gelu": ("gelu", "geglu"),
    "gelu_python": ("gelu", "geglu"),
    "gelu_new": ("gelu_tanh", "geglu_tanh"),
    "gelu_fast": ("gelu_tanh", "geglu_tanh"),
    "gelu_pytorch_tanh": ("gelu_tanh", "geglu_tanh"),
    "relu": ("relu", "reglu"),
    "silu": ("silu", "swiglu"),
    "swish": ("silu", "swiglu"),
}
_POOL: Final = 512  # rows of a vocabulary to draw from; the whole table can be most of a model
_SEED: Final = 0


class Float64Stays(TorchFunctionMode):
    """Inside, whatever asks for a float64 tensor in float32 gets it in float64."""

    def __torch_function__(
        self, func: Callable[..., Any], _types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run `func` with float32 replaced among its arguments, where its first one is float64."""
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in kwargs.items()}
        return func(*args, **kwargs)


def in_float64(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`forward` on a batch of one: rows (n, d), and a memory (m, d) if any, float64 to (n, d), nothing narrowed."""

    def one_sequence(*rows: Tensor) -> Tensor:
        with Float64Stays():
            return forward(*(part.unsqueeze(0) for part in rows)).squeeze(0)

    return one_sequence


def eager(module: nn.Module) -> None:
    """Have every part of `module` compute attention in plain torch, in place."""
    for part in module.modules():
        config = getattr(part, "config", None)
        if config is not None:
            config._attn_implementation = "eager"


def causal_mask(config: Any, rows: Tensor) -> Tensor | None:
    """The mask that transformers' own models give their layers for (1, n, d) without padding."""
    from transformers import masking_utils

    sliding = getattr(config, "sliding_window", None) is not None
    make = masking_utils.create_sliding_window_causal_mask if sliding else masking_utils.create_causal_mask
    positions = torch.arange(rows.shape[1]).unsqueeze(0)
    mask: Tensor | None = make(
        config=config, inputs_embeds=rows, attention_mask=None, cache=None, position_ids=positions
    )
    return mask


def plain_activation(name: str, module: nn.Module) -> str | Activation:
    """Our name for an activation of transformers, or the module itself, whose elementwise rows the proof checks."""
    return _ACTIVATIONS[name][0] if name in _ACTIVATIONS else module


def gated_activation(name: str) -> str:
    """Our name for the FFN whose gate has an activation of transformers.

    Raises:
        ExportError: there is none.
    """
    gated = _ACTIVATIONS[name][1] if name in _ACTIVATIONS else None
    if gated is None:
        raise ExportError(
            f"a gate with the activation {name!r} has no packed form, expected one of {', '.join(_ACTIVATIONS)}"
        )
    return gated


def side_by_side(linears: Iterable[nn.Linear]) -> nn.Linear:
    """One nn.Linear that gives the outputs of `linears` one after another; a bias that some lack is zero there."""
    linears = list(linears)
    biased = any(part.bias is not None for part in linears)
    with torch.device("meta"):
        merged = nn.Linear(linears[0].in_features, sum(part.out_features for part in linears), bias=biased)
    merged.weight = nn.Parameter(torch.cat([part.weight for part in linears]), requires_grad=False)
    if biased:
        biases: list[Tensor] = [
            part.weight.new_zeros(part.out_features) if part.bias is None else part.bias for part in linears
        ]
        merged.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return merged


def linear_of_conv1d(conv: nn.Module) -> nn.Linear:
    """transformers' Conv1D, whose weight is (in, out), as an nn.Linear that shares it."""
    weight, bias = conv.weight, conv.bias
    assert isinstance(weight, Tensor)
    assert isinstance(bias, Tensor)
    with torch.device("meta"):
        linear = nn.Linear(*weight.shape)
    linear.weight = nn.Parameter(weight.detach().T, requires_grad=False)
    linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return linear


def rms_norm(norm: nn.Module) -> nn.RMSNorm:
    """LlamaRMSNorm and its equals as an nn.RMSNorm that shares the weight.

    Raises:
        AttributeError, TypeError: it is something else; see `packing`.
    """
    weight, eps = norm.weight, norm.variance_epsilon
    if not isinstance(weight, nn.Parameter) or not isinstance(eps, float):
        raise TypeError(f"expected a parameter and a number, found {type(weight).__name__} and {type(eps).__name__}")
    made = nn.RMSNorm(len(weight), eps=eps, device="meta")
    made.weight = weight
    return made


def last_norm(norm: nn.Module) -> nn.Module | None:
    """A model's last norm as ours; None where it was taken out (an nn.Identity in its place).

    Raises:
        ExportError: it is neither a layer norm nor an RMS norm.
    """
    if isinstance(norm, nn.Identity):
        return None
    with packing("the last norm", norm):
        norm = norm if isinstance(norm, nn.LayerNorm) else rms_norm(norm)
    return norm


def embedding_sampler(words: Tensor, positions: Tensor | None = None) -> Sampler:
    """Tokens as a model meets them: random rows of its embeddings, plus their positions' where it has some.

    Args:
        words: (vocabulary, d); at most 512 rows are kept.
        positions: (longest, d), added by the place in the sequence.
    """
    ids = np.random.default_rng(_SEED).choice(len(words), min(_POOL, len(words)), replace=False)
    pool = words.detach()[torch.from_numpy(np.sort(ids))].float().clone()
    places = None if positions is None else positions.detach()[:_POOL].float().clone()

    def sample(seq_lens: Sequence[int], rng: np.random.Generator) -> Float32:
        rows = pool[torch.from_numpy(rng.integers(len(pool), size=sum(seq_lens)))]
        if places is not None:
            rows = rows + places[torch.cat([torch.arange(length) % len(places) for length in seq_lens])]
        array: Float32 = rows.numpy()
        return array

    return sample
