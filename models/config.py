"""Configurations of models, as in checkpoints, and the conversion of tensors to our parameters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxinfer.models.layouts import LAYOUTS, Layout


@dataclass(frozen=True)
class Rope:
    """Rotary positions (Su et al., 2021), after any rule that stretches them to long contexts.

    Attributes:
        frequencies: radians per position of each of the H / 2 pairs.
        factor: factor of cosines and sines (YaRN's attention factor).
    """

    frequencies: tuple[float, ...]
    factor: float = 1.0


@dataclass(frozen=True)
class EightBits:
    """The dtypes, by name, in which linear weights of 8 bits are stored and multiplied.

    Attributes:
        stored: ``int8`` or ``float8_e4m3fn``.
        computed: dtype to which they are converted before products.
    """

    stored: str
    computed: str


@dataclass(frozen=True)
class ModelConfig:
    """The numbers that define a decoder-only transformer, under Hugging Face's names.

    Attributes:
        architecture: Hugging Face's class name, e.g. ``"LlamaForCausalLM"``.
        intermediate_size: size of the feed-forward layer, or of one expert.
        head_dim: H; need not be hidden_size / num_attention_heads.
        max_position_embeddings: longest sequence, in tokens.
        norm_eps: number added under the square root of norms.
        eos_token_ids: tokens that end a text.
        rope: rotary positions; None if positions are learned.
        local_rope: rotary positions of layers with a window, if they differ from the others'.
        windows: for each layer, the number of last tokens that it sees, including its own; None is
            all.
        attention_scale: scale of scores; None is 1 / sqrt(head_dim).
        attention_bias: whether Llama's queries, keys, values and outputs have biases.
        num_experts: number of experts; 0 is one dense feed-forward layer.
        num_experts_per_tok: number of experts per token; 0 without experts.
        norm_topk_prob: whether the shares of a token's experts add up to 1.
        stored_bits: dtype of linear weights in the checkpoint, if it has scales for them.
        wide_weights: paths of linear weights that such a checkpoint stores in a wider dtype.
        kernels: kernels for attention and products, see ``pallas_kernels.choice``; not a property
            of the model.
        layout: placement on the mesh; not a property of the model.
        eight_bits: formats of linear weights of 8 bits, if any; not a property of the model.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    windows: tuple[int | None, ...]
    rope: Rope | None = None
    local_rope: Rope | None = None
    attention_scale: float | None = None
    attention_bias: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    norm_topk_prob: bool = True
    stored_bits: str | None = None
    wide_weights: tuple[str, ...] = ()
    kernels: str = "plain"
    layout: Layout = LAYOUTS["megatron"]
    eight_bits: EightBits | None = None


@dataclass(frozen=True)
class WeightSpec:
    """How a parameter is made from tensors of a checkpoint.

    Attributes:
        names: one tensor, or several that are stacked along a new first axis.
        shape: shape of each tensor in the checkpoint.
        convert: converts a tensor, a numpy or JAX array, from the checkpoint's layout to the
            parameter's. Equal tensors have the same function, so that they share a program.
    """

    names: str | tuple[str, ...]
    shape: tuple[int, ...]
    convert: Callable[[Any], Any]

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors, as a tuple even if there is only one."""
        return (self.names,) if isinstance(self.names, str) else self.names

    def made_of(self, arrays: Sequence[Any], stack: Callable[[list[Any]], Any]) -> Any:
        """Make the parameter from its tensors, which ``stack`` joins along a new first axis."""
        converted = [self.convert(array) for array in arrays]
        return converted[0] if isinstance(self.names, str) else stack(converted)
