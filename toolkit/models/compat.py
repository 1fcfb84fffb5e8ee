"""Names of other libraries that are not public, which models need; tests/models/test_compat.py fails when one moves.

Seen in transformers 5.23, torch 2.13 and torchao 0.18.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from toolkit.system.devices import chosen_type

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# -- transformers ----------------------------------------------------------------------------------------------------


def commit_of(config: PretrainedConfig) -> str | None:
    """The commit on the Hub that a model's config was read from."""
    return getattr(config, "_commit_hash", None)


def set_commit(config: PretrainedConfig, commit: str | None) -> None:
    """transformers writes it in no file, and (5.23) no longer sets it itself."""
    config._commit_hash = commit


def attention_of(config: PretrainedConfig) -> str | None:
    """The attention function that a model's layers call: sdpa, eager, or a registered name."""
    return getattr(config, "_attn_implementation", None)


@contextlib.contextmanager
def saved_as_they_are() -> Iterator[None]:
    """Within this `save_pretrained` takes models as they are, without looking for DDP's or DeepSpeed's wrapper around them.

    For that transformers (5.23) calls Accelerate (1.15), which imports DeepSpeed: seconds in every run where it is installed.
    """
    from transformers import modeling_utils

    before = modeling_utils.unwrap_model
    setattr(modeling_utils, "unwrap_model", lambda model: model)  # noqa: B010, mypy takes an overloaded function for a constant
    try:
        yield
    finally:
        setattr(modeling_utils, "unwrap_model", before)  # noqa: B010


def class_for(auto: Any, config: PretrainedConfig) -> type[PreTrainedModel]:
    """The class that an Auto class makes of a config; KeyError where it makes none.

    Not `in mapping.keys()`, which imports the configurations of all models, more than a second.
    """
    found = auto._model_mapping[type(config)]
    return found[0] if isinstance(found, (tuple, list)) else found


def is_stateful(model_class: type | None) -> bool:
    """Whether its layers carry a state along the row."""
    return bool(getattr(model_class, "_is_stateful", False))


def takes_attention_functions(model_class: type) -> bool:
    """Whether its layers call the attention function that is registered under the config's name."""
    return bool(getattr(model_class, "_supports_attention_backend", False))


def takes_flash_attention(model_class: type) -> bool:
    """Whether it hands its sliding windows to the attention function."""
    return bool(getattr(model_class, "_supports_flash_attn", False))


def takes_sdpa(model_class: type) -> bool:
    """Whether it has torch's attention."""
    return bool(getattr(model_class, "_supports_sdpa", False))


def renames_old_weights(model: nn.Module) -> bool:
    """Whether weights that older versions wrote get other names as they are read."""
    return bool(getattr(model, "_checkpoint_conversion_mapping", None))


def set_backend(tokenizer: PreTrainedTokenizerBase, backend: Tokenizer) -> None:
    """Put another tokenizer of tokenizers behind one of transformers: it is what `backend_tokenizer` returns."""
    tokenizer._tokenizer = backend


def compile_template(template: str) -> None:
    """Read a chat template in the very environment that renders it later, with its extensions."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    _compile_jinja_template(template)


def number_documents_without_waiting(names: set[str]) -> None:
    """Let models whose attention is of these names number the documents of packed rows without waiting for a GPU.

    Before each forward pass transformers (5.23) checks whether rows hold several documents, which is known on the GPU alone.
    Numbers of rows with one document are as right, so the check is skipped. What else masks are made of does not change.
    """
    from transformers import masking_utils

    prepare = getattr(masking_utils, "_preprocess_mask_arguments", None)
    if prepare is None or getattr(prepare, "numbers_without_waiting", False):
        return

    @functools.wraps(prepare)
    def prepared(
        config: PretrainedConfig, inputs_embeds: torch.Tensor, attention_mask: Any, past_key_values: Any,
        position_ids: torch.Tensor | None, *more: Any, **named: Any,
    ) -> Any:  # fmt: skip
        on_cpu = inputs_embeds.device.type == "cpu" or torch.compiler.is_compiling()
        other = attention_of(config) not in names or attention_mask is not None or past_key_values is not None
        if on_cpu or other or position_ids is None:
            return prepare(config, inputs_embeds, attention_mask, past_key_values, position_ids, *more, **named)
        done, mask, _, *lengths = prepare(config, inputs_embeds, None, None, None, *more, **named)
        position_ids = position_ids.expand(len(inputs_embeds), -1)
        starts = torch.diff(position_ids, prepend=position_ids[:, :1] - 1) != 1
        return done, mask, starts.cumsum(-1), *lengths

    prepared.numbers_without_waiting = True  # type: ignore[attr-defined]
    masking_utils._preprocess_mask_arguments = prepared


# -- torch -----------------------------------------------------------------------------------------------------------


def finds_cpp_compiler() -> bool:
    """Whether inductor finds the compiler that it needs for a CPU."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


def flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, key_bounds: torch.Tensor, longest: int,
    causal: bool, window: int | None, scale: float, dropout: float,
) -> torch.Tensor:  # fmt: skip
    """Flash attention of documents in a row: `[tokens, heads, head_dim]`, with fewer heads in key and value or as many.

    The operator that torch's own scaled_dot_product_attention and torch.nn.attention.varlen end in (2.11 to 2.13). The
    latter, which is public, has no dropout, and is an operator of Python: the processor takes three times as long to launch it.
    """
    before = -1 if window is None else window - 1
    output: torch.Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, bounds, key_bounds, longest, longest, dropout, causal and window is None, False, scale=scale,
        window_size_left=before, window_size_right=0 if causal else before,
    )[0]  # fmt: skip
    return output


def is_compiled(module: nn.Module) -> bool:
    """Whether a module was compiled in place, by `module.compile`."""
    return module._compiled_call_impl is not None


def hooks_before(module: nn.Module) -> list[Any]:
    """The hooks that are called before a module's forward pass."""
    return list(module._forward_pre_hooks.values())


def has_hooks(module: nn.Module) -> bool:
    """Whether anything is called around a module's forward or backward pass, or in the place of its forward (accelerate's)."""
    around = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return any(around) or "forward" in vars(module)


def softmax_backward(of_weights: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The gradient of a softmax's input, of that of its output, over the last dimension: one kernel."""
    return torch._softmax_backward_data(of_weights, weights, -1, weights.dtype)


# -- torchao ---------------------------------------------------------------------------------------------------------


@functools.cache
def linear_in_float8() -> Any:
    """A linear layer that multiplies in float8 what would be multiplied in half precision, and anything else as it is.

    torchao (0.18) converts to a class that it calls private, which multiplies in float8 always, so also what a model that is
    loaded is asked on the CPU before it's trained on a GPU. Of autocast it knows that of CUDA alone.
    """
    from torchao.float8.float8_linear import Float8Linear

    class LinearInFloat8(Float8Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            kind = input.device.type
            dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
            is_elsewhere = chosen_type(input.device) == "cpu" and not self.config.emulate
            if is_elsewhere or dtype.itemsize != 2:
                return nn.functional.linear(input, self.weight, self.bias)
            output: torch.Tensor = super().forward(input.to(dtype))
            return output

    return LinearInFloat8
