"""The numbers of GPUs and models, by name, from which clusters are modelled."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from pydantic import Field, field_validator

from jaxinfer.errors import JaxinferError
from jaxinfer.files.shipped import read_shipped
from jaxinfer.options.validation import OptionError, Options, did_you_mean

# Collectives over PCIe if cards do not read each other's memory. The rate is that of
# LLMServingSim's example clusters for two such cards (16 GiB/s). Public runs of nccl-tests on four
# RTX 4090 have 12.8 GB/s, plus 26 to 36 us from 128 KiB to 2 MiB
# (tinygrad/open-gpu-kernel-modules#22).
PCIE_GB_S, PCIE_S = 17.0, 30e-6
# Collectives over NVLink: NCCL on two A100 or H100 SXM, 256 KiB to 16 MiB, as in NVIDIA's
# aiconfigurator.
NVLINK_SHARE, NVLINK_S = 0.5, 12e-6
# Bytes of a number, by dtype; those of a step have 16 bits.
ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
ITEMSIZE = ITEMSIZES["bfloat16"]
# The default between domains: an adapter of 400 Gbit/s for each GPU.
NETWORK_GB_S = 50.0
# Connections between GPUs; collectives over PCIe go through the host. A CPU has its memory, and a
# single GPU has none.
LINKS = ("NVLink", "PCIe", "InfinityFabric", "ICI", "memory", "none")


class Gpu(Options):
    """A kind of GPU, by its maker's numbers.

    Attributes:
        bf16_tflops: dense bfloat16 rate, in 10^12 operations per second.
        memory_gb: total memory, as its maker's tool shows it, in 10^9 bytes (not GiB).
        memory_gb_s: memory bandwidth, in 10^9 bytes per second.
        link: connection between the GPUs of one node: one of ``LINKS``, or one with its generation,
            such as ``NVLink4``.
        link_gb_s: bandwidth of the link in each direction, in 10^9 bytes per second.
        domain: number of GPUs that the link connects; None for any number.
        network_gb_s: bandwidth to GPUs of other domains, as for ``link_gb_s``.
        watts: power limit; None if unknown.
        device_kind: JAX's name for it.
        checked: whether the numbers were checked against a second source.
        all_reduce_gb_s: bandwidth of large all-reduces, as nccl-tests' busbw, in 10^9 bytes per
            second. By default, see ``collective`` and ``stated_collective``.
        all_reduce_s: fixed seconds of each all-reduce.
    """

    bf16_tflops: float = Field(gt=0)
    memory_gb: float = Field(gt=0)
    memory_gb_s: float = Field(gt=0)
    link: str
    link_gb_s: float = Field(gt=0)
    domain: int | None = Field(default=None, ge=1)
    network_gb_s: float = Field(default=NETWORK_GB_S, gt=0)
    watts: float | None = Field(default=None, gt=0)
    device_kind: str | None = None
    checked: bool = False
    all_reduce_gb_s: float | None = Field(default=None, gt=0)
    all_reduce_s: float | None = Field(default=None, ge=0)

    @field_validator("link")
    @classmethod
    def _is_known(cls, value: str) -> str:
        known = {name.lower(): name for name in LINKS}
        if value.lower().rstrip("0123456789") not in known:
            near = did_you_mean(value.lower(), known)
            hint = next((each for name, each in known.items() if f"'{name}'" in near), None)
            said = f"did you mean {hint!r}?" if hint else f"must be one of {', '.join(LINKS)}"
            raise ValueError(f"{value!r}: {said}")
        return value

    @property
    def is_torus(self) -> bool:
        """True if each axis of a mesh has its own links."""
        return self.link.upper().startswith("ICI")

    @property
    def stated_collective(self) -> tuple[float, float]:
        """GB/s and fixed seconds of all-reduces, as a roofline uses them.

        By default the link's rate and 0 s, because a roofline applies its own fractions to peaks.
        """
        return self.all_reduce_gb_s or self.link_gb_s, self.all_reduce_s or 0.0

    @property
    def collective(self) -> tuple[float, float]:
        """GB/s (10^9 bytes per second) and fixed seconds of collectives, for tables.

        By default, PCIe of any generation has at most ``PCIE_GB_S``, since data goes through the
        host's memory; other links have ``NVLINK_SHARE`` of their rate.
        """
        if self.link.lower().startswith("pcie"):
            gb_s, each_s = min(self.link_gb_s, PCIE_GB_S), PCIE_S
        else:
            gb_s, each_s = NVLINK_SHARE * self.link_gb_s, NVLINK_S
        if self.all_reduce_gb_s is not None:
            gb_s = self.all_reduce_gb_s
        return gb_s, each_s if self.all_reduce_s is None else self.all_reduce_s


class WideLayers(Options):
    """Numbers of layers in which each linear weight of an 8-bit model keeps 16 bits.

    Attributes:
        q, k, v, o: weights of attention.
        gate, up, down: weights of the feed-forward layer, or of all its experts.
    """

    q: int = Field(default=0, ge=0)
    k: int = Field(default=0, ge=0)
    v: int = Field(default=0, ge=0)
    o: int = Field(default=0, ge=0)
    gate: int = Field(default=0, ge=0)
    up: int = Field(default=0, ge=0)
    down: int = Field(default=0, ge=0)


class ModelShape(Options):
    """The numbers of a decoder-only transformer that decide its cost, with Hugging Face's names.

    Attributes:
        head_dim: by default ``hidden_size / num_attention_heads``.
        gated: whether the feed-forward layer has three matrices instead of two.
        qk_norm: whether queries and keys of each head are normalised.
        num_experts: number of experts; 0 is one dense feed-forward layer. ``intermediate_size`` is
            that of one expert.
        num_experts_per_tok: number of experts per token; 0 without experts.
        sliding_window: number of entries that a token sees in ``windowed_layers`` of the layers.
            Only published tables have times of such layers.
        stored_bits: 8-bit format in which its linear weights are stored, which
            ``weight_dtype: auto`` keeps.
        wide_layers: linear weights that are not stored in 8 bits.
        max_position_embeddings: number of tokens of the longest sequence; None for no limit.
    """

    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_hidden_layers: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    head_dim: int | None = Field(default=None, ge=1)
    tie_word_embeddings: bool = False
    gated: bool = True
    qk_norm: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    sliding_window: int = Field(default=0, ge=0)
    windowed_layers: int = Field(default=0, ge=0)
    stored_bits: Literal["int8", "fp8"] | None = None
    wide_layers: WideLayers = WideLayers()
    max_position_embeddings: int | None = Field(default=None, ge=1)

    def model_post_init(self, context: Any, /) -> None:
        """Refuse heads that do not divide, more special layers than layers, and unused experts."""
        if self.num_attention_heads % self.num_key_value_heads:
            raise OptionError(
                f"num_key_value_heads is {self.num_key_value_heads}, must divide "
                f"num_attention_heads, {self.num_attention_heads}"
            )
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise OptionError(
                f"head_dim is missing: hidden_size, {self.hidden_size}, is no multiple of "
                f"num_attention_heads, {self.num_attention_heads}"
            )
        if self.windowed_layers and not self.sliding_window:
            raise OptionError("sliding_window is missing, windowed_layers are given")
        if self.windowed_layers > self.num_hidden_layers:
            raise OptionError(
                f"windowed_layers is {self.windowed_layers}, of {self.num_hidden_layers} layers"
            )
        for kind, count in self.wide_layers:
            if count > (self.num_hidden_layers if self.stored_bits else 0):
                raise OptionError(
                    f"wide_layers.{kind} is {count}, of {self.num_hidden_layers} layers with "
                    f"stored_bits {self.stored_bits}"
                )
        if self.num_experts and not 0 < self.num_experts_per_tok <= self.num_experts:
            raise JaxinferError(
                f"num_experts_per_tok is {self.num_experts_per_tok}, of {self.num_experts} experts"
            )

    @property
    def head_size(self) -> int:
        """Head size H."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def attention_parameters(self) -> int:
        """Number of parameters of one layer's attention: queries, keys, values, output."""
        N, K = self.num_attention_heads, self.num_key_value_heads
        return self.hidden_size * self.head_size * (2 * N + 2 * K)

    @property
    def expert_parameters(self) -> int:
        """Number of parameters of one expert of a layer, or of its dense feed-forward layer."""
        return (2 + self.gated) * self.hidden_size * self.intermediate_size

    def experts_read(self, tokens: float) -> float:
        """Return the mean number of a layer's experts that ``tokens`` tokens are sent to.

        It is E (1 - (1 - k / E)^tokens), if each token draws its k of E uniformly and
        independently.
        """
        E = self.num_experts
        return E * (1 - (1 - self.num_experts_per_tok / E) ** tokens) if E else 1.0

    @property
    def layer_parameters(self) -> int:
        """Number of parameters of one layer, including all experts and their router."""
        experts = max(self.num_experts, 1) * self.expert_parameters
        return self.attention_parameters + experts + self.num_experts * self.hidden_size

    def weight_size(self, narrow: float, kinds: Collection[str] = ()) -> float:
        """Return the mean bytes per number of the layers' linear weights.

        Args:
            narrow: bytes of weights that are not among ``wide_layers``.
            kinds: names of some of the weights, as in ``WideLayers``; by default all.
        """
        N, K = self.num_attention_heads, self.num_key_value_heads
        sizes = {"q": N, "k": K, "v": K, "o": N}
        numbers = {kind: self.hidden_size * self.head_size * heads for kind, heads in sizes.items()}
        experts = self.hidden_size * self.intermediate_size * max(self.num_experts, 1)
        numbers |= dict.fromkeys(("gate", "up", "down") if self.gated else ("up", "down"), experts)
        numbers = {kind: count for kind, count in numbers.items() if not kinds or kind in kinds}
        wide = sum(getattr(self.wide_layers, kind) * count for kind, count in numbers.items())
        if not wide:
            return narrow
        share = wide / (sum(numbers.values()) * self.num_hidden_layers)
        return narrow + share * (ITEMSIZE - narrow)

    def parameters(self, layers: int, first: bool, last: bool) -> int:
        """Return the number of parameters of a stage."""
        table = self.vocab_size * self.hidden_size
        tables = first + last
        if first and last and self.tie_word_embeddings:
            tables = 1
        return layers * self.layer_parameters + tables * table

    def kv_bytes(self, layers: int, itemsize: int) -> int:
        """Return the bytes of one token's keys and values."""
        return 2 * layers * self.num_key_value_heads * self.head_size * itemsize


@dataclass(frozen=True)
class Catalogue:
    """GPUs and models by name: shipped ones, and the user's own.

    Attributes:
        gpus: the user's own GPUs.
        models: the user's own models.

    Raises:
        JaxinferError: a name is already that of a shipped one.
    """

    gpus: Mapping[str, Gpu] = field(default_factory=dict)
    models: Mapping[str, ModelShape] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for section, own in (("gpus", self.gpus), ("models", self.models)):
            for name in own:
                if name in _read(f"{section}.yaml"):
                    raise JaxinferError(
                        f"{section}.{name}: configs/{section}.yaml has that name; give it another"
                    )

    def and_those_of(self, file: str, more: "Catalogue") -> "Catalogue":
        """Return this catalogue with the entries of ``more``, which come from ``file``, added.

        Raises:
            JaxinferError: a name occurs in both.
        """
        for section in ("gpus", "models"):
            for name in getattr(more, section):
                if name in getattr(self, section):
                    raise JaxinferError(f"{section}.{name}: {file} has that name, too")
        return Catalogue({**self.gpus, **more.gpus}, {**self.models, **more.models})

    def gpu(self, kind: str | None) -> Gpu:
        """Find a GPU by its name.

        Raises:
            JaxinferError: the name is unknown.
        """
        if kind is not None and kind in self.gpus:
            return self.gpus[kind]
        shipped = _read("gpus.yaml")
        if kind is None or kind not in shipped:
            known = [*shipped, *self.gpus]
            short = str(kind).lower()
            alike = [n for n in known if n.lower() == short or n.lower().startswith(f"{short}-")]
            hint = f"known: {', '.join(alike)}" if alike else did_you_mean(str(kind), known)
            raise OptionError(f"kind: no GPU {kind!r}: {hint}")
        return Gpu.model_validate(shipped[kind])

    def has_model(self, name: str) -> bool:
        """Tell whether a model has this name."""
        return name in self.models or name in _read("models.yaml")

    def model(self, name: str) -> ModelShape:
        """Find a model by its name; ``checkpoints/modelled.py`` also finds models in folders.

        Raises:
            JaxinferError: there is no such model.
        """
        if name in self.models:
            return self.models[name]
        shipped = _read("models.yaml")
        if name in shipped:
            return ModelShape.model_validate(shipped[name])
        raise JaxinferError(
            f"model {name!r}: no folder with config.json; "
            f"{did_you_mean(name, [*shipped, *self.models])}"
        )


def sum_known(amounts: Iterable[float | None]) -> float | None:
    """Return the sum of all amounts; None if one is unknown."""
    total = 0.0
    for amount in amounts:
        if amount is None:
            return None
        total += amount
    return total


def find_gpu(kind: str | None) -> Gpu:
    """Find a GPU by its name in ``configs/gpus.yaml``; see ``Catalogue.gpu``."""
    return Catalogue().gpu(kind)


def gpu_names() -> list[str]:
    """Return the names in ``configs/gpus.yaml``."""
    return list(_read("gpus.yaml"))


def gpu_of_device(device_kind: str) -> Gpu | None:
    """Return the GPU in ``configs/gpus.yaml`` that JAX calls ``device_kind``, or None."""
    return name_of_device(device_kind)[1]


def name_of_device(device_kind: str) -> tuple[str, Gpu | None]:
    """Return a device's name and numbers in ``configs/gpus.yaml``, or its JAX name and None."""
    for name, facts in _read("gpus.yaml").items():
        if facts.get("device_kind") == device_kind:
            return name, Gpu.model_validate(facts)
    return device_kind, None


def find_model(model: str) -> ModelShape:
    """Find a model by its name in ``configs/models.yaml``; see ``Catalogue.model``."""
    return Catalogue().model(model)


@cache
def _read(name: str) -> Mapping[str, Any]:
    facts: Mapping[str, Any] = read_shipped(name)
    return facts
