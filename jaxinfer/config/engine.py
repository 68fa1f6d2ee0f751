"""The options of one engine, for ``LLM``, run files and instances."""

import warnings
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from jaxinfer.caches.eviction import Eviction
from jaxinfer.files.shipped import read_shipped
from jaxinfer.options.validation import OptionError, Options, did_you_mean, shown
from jaxinfer.serving.paging import Paging
from jaxinfer.serving.policies import PolicyOptions

# Default numbers of requests and of tokens in a step on a GPU.
GPU_SEQS, GPU_TOKENS = 256, 8192
# Default share of a GPU's memory for weights and KV.
GPU_SHARE = 0.9


def engine_named(name: object) -> dict[str, Any]:
    """Return the options of a shipped engine by its name.

    Raises:
        OptionError: the name is unknown.
    """
    known = read_shipped("engines.yaml")
    if not isinstance(name, str) or name not in known:
        raise OptionError(f"like: no engine {shown(name)}: {did_you_mean(str(name), known)}")
    return dict(known[name])


class EngineOptions(Options):
    """Options that decide how a model is run. Options that vLLM also has keep vLLM's names.

    Attributes:
        like: Name of an engine in ``configs/engines.yaml``; its options apply where you do not set
            your own.
        load_format: ``auto`` reads the model's weights; ``dummy`` draws random ones from ``seed``,
            to measure speed. Then ``config.json`` is enough; without a tokenizer, prompts must be
            ``prompt_token_ids``.
        generation_config: Source of the default sampling options: the model's
            ``generation_config.json`` (``auto``), none (``vllm``), or a folder with that file. A
            folder's file also adds its end-of-text tokens, and its ``max_new_tokens`` limits every
            line of a batch.
        dtype: Format of weights and computation; ``auto`` is float32 on CPUs, bfloat16 on GPUs.
        weight_dtype: Format of the weights of linear layers; ``auto`` keeps the 8-bit weights of a
            checkpoint and converts others to ``dtype``. ``int8`` and ``fp8`` have a scale per
            output channel, and are multiplied in ``dtype``; embeddings, heads, norms and biases
            stay in ``dtype``.
        kv_cache_dtype: Format of the KV cache; ``auto`` is ``dtype``; ``int8`` and ``fp8`` take
            half the memory of 16-bit formats and, on CPUs, need the slower ``kernels: plain``. Both
            keep a scale per page and head; fp8 is e4m3 and needs a GPU of sm_89 or newer.
        tensor_parallel_size: Devices that share each layer.
        layout: Placement of parameters, activations and KV on an instance's devices: a name in
            ``models/layouts.py``, or a Python file. The file has a ``LAYOUT``, or only ``RULES``
            for parameters. By default ``megatron``; modelled devices then have equal parts of
            everything.
        page_size: Tokens per KV page.
        num_pages: Pages of the KV pool, including one for padding; by default as many as
            ``memory_fraction`` allows. Pages that can never be used are left out.
        memory_fraction: Share of a GPU's memory for weights and KV (default 0.9), or of a CPU's
            free memory for KV (default 0.2). A GPU's memory is what JAX may use: 95 % of what is
            free, unless ``XLA_PYTHON_CLIENT_MEM_FRACTION`` sets another share.
        max_num_seqs: Largest number of requests that run at once; 256 by default on GPUs.
        max_num_batched_tokens: Largest number of tokens in one step; 8,192 by default on GPUs.
        token_buckets: Numbers of tokens for which steps with prefill are compiled; a step is padded
            to the next of them. The largest is ``max_num_batched_tokens``; by default down to 64,
            each a quarter of the next.
        max_model_len: Largest number of prompt and output tokens of a request; by default the
            model's.
        enable_prefix_caching: Keep full pages after a request ends, and reuse them for prompts that
            begin with the same tokens.
        kernels: Attention kernels (docs/kernels.md). ``hopper`` runs on sm_90, ``generic`` on other
            NVIDIA GPUs, ``numba`` on CPUs with the extra ``cpu``, ``plain`` JAX anywhere;
            ``interpret`` checks results. ``auto`` takes the first of these that the device can run,
            but ``plain`` on a GPU where entries are float32. ``ampere`` has a decode kernel without
            Triton on sm_80 to sm_89. ``numba`` computes products of float32, too.
        max_in_flight: Largest number of launched steps that have not ended; by default 2 with
            ``launch_ahead``, else one per stage. Only a modelled instance that launches ahead may
            have more than 2.
        launch_ahead: Launch a decode step before the previous token has reached the host.
        chunks_in_flight: With ``all``, chunks of a long prompt fill all pipeline stages; with
            ``1``, a chunk waits until the one before it has ended, as in Vidur and in vLLM before
            version 1.
        watermark: Share of the pages that admission leaves free for the growth of running requests.
        paging: When pages of the KV pool are taken, cached and freed.
        eviction: Order in which unused cached pages are evicted.
        late_tokens: Tokens that steps in flight still sample for a preempted request: ``dropped``
            and sampled again, or ``kept``, in which case the request waits for them.
        empty_waits: If no step can be formed while others are in flight, wait until one of them has
            ended before trying again.
        half_batches: Compute steps with attention groups as two halves, one after the other:
            ``always``, or only where this is faster (``by_time``). The exchange of one half with
            the groups then overlaps with the dense layers of the other.
        micro_batches: Number of micro-batches into which steps of stages with an ``ffn`` group are
            divided, so that the FFN of one overlaps with the attention of the others.
        max_transfers_in_flight: Largest number of requests whose KV an instance fetches at once.
        policies: Names of the policies for order, admission, batches and victims.
        strict_shapes: Report an error when a step was not compiled in advance.
        seed: Seed of random weights, and of the sampling of requests without a seed (together with
            their ids).
    """

    like: str | None = None
    load_format: Literal["auto", "dummy"] = "auto"
    generation_config: str = Field(default="auto", min_length=1)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    weight_dtype: Literal["auto", "int8", "fp8"] = "auto"
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = "auto"
    tensor_parallel_size: int = Field(default=1, ge=1)
    layout: str | None = None
    page_size: int = Field(default=64, ge=1, le=1024)
    num_pages: int | None = Field(default=None, ge=2)
    memory_fraction: float | None = Field(default=None, gt=0, le=1)
    max_num_seqs: int = Field(default=64, ge=1)
    max_num_batched_tokens: int = Field(default=512, ge=1)
    token_buckets: tuple[Annotated[int, Field(ge=2)], ...] | None = Field(
        default=None, strict=False
    )
    max_model_len: int | None = Field(default=None, ge=2)
    enable_prefix_caching: bool = True
    kernels: Literal["auto", "plain", "numba", "generic", "ampere", "hopper", "interpret"] = "auto"
    max_in_flight: int | None = Field(default=None, ge=1)
    launch_ahead: bool = True
    chunks_in_flight: Literal[1, "all"] = "all"
    half_batches: Literal["never", "by_time", "always"] = "never"
    micro_batches: int = Field(default=1, ge=1, le=16)
    watermark: float = Field(default=0.01, ge=0, lt=1)
    paging: Paging = Paging()
    eviction: Eviction = Eviction()
    late_tokens: Literal["dropped", "kept"] = "dropped"
    empty_waits: bool = False
    max_transfers_in_flight: int = Field(default=4, ge=1)
    policies: PolicyOptions = PolicyOptions()
    strict_shapes: bool = False
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _be_like(cls, data: Any) -> Any:
        """Add the options of the engine named in ``like``, except those that are given."""
        if not isinstance(data, dict) or data.get("like") is None:
            return data
        theirs = engine_named(data["like"])
        for key in ("policies", "paging"):
            ours = data.get(key)
            if key in theirs and isinstance(ours, dict):
                data = data | {key: theirs[key] | ours}
        return theirs | data

    @model_validator(mode="before")
    @classmethod
    def _take_old_key(cls, data: Any) -> Any:
        """Accept ``sharding``, the former name of ``layout``, with a warning."""
        if not isinstance(data, dict) or "sharding" not in data:
            return data
        if data["sharding"] is None:  # The default, as records of runs show it.
            return {key: data[key] for key in data if key != "sharding"}
        if "layout" in data:
            raise OptionError("sharding: layout is its name now, and is given, too; remove one")
        warnings.warn("sharding is now layout", FutureWarning, stacklevel=2)
        return {"layout" if key == "sharding" else key: data[key] for key in data}

    @field_validator("layout", mode="before")
    @classmethod
    def _one_layout(cls, value: object) -> object:
        if isinstance(value, dict | list | tuple):
            raise ValueError(
                f"must be one name or file, not {shown(value)}: prefill and decode with layouts of "
                "their own are two instances"
            )
        return value

    @field_validator("dtype", mode="before")
    @classmethod
    def _wide(cls, value: object) -> object:
        if value in ("int8", "fp8"):
            raise ValueError(f"{value} is a format of weights alone: weight_dtype: {value}")
        if value in ("float16", "fp16", "half"):
            raise ValueError(
                f"{value} is not supported: bfloat16 takes as much memory, float32 is exact"
            )
        return value

    def check_real(self) -> None:
        """Raise OptionError for options that only a modelled instance can have."""
        if self.launch_ahead and self.num_stages == 1 and (self.max_in_flight or 0) > 2:
            raise OptionError(
                f"max_in_flight is {self.max_in_flight}, must be at most 2: a decode's input is "
                "the token of the step before, and only a modelled instance may have more"
            )
        if self.paging != Paging() or self.late_tokens != "dropped":
            raise OptionError(
                "paging and late_tokens must have their defaults: only a modelled instance may "
                "have others"
            )

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages; the running requests are divided among as many steps."""
        return 1

    def sharing_gpu(self, users: int) -> Self:
        """Return options with an equal share of a shared GPU's memory, unless a share is set.

        Args:
            users: number of stages on the GPU, including this one.
        """
        if users < 2 or self.memory_fraction:
            return self
        return self.model_copy(update={"memory_fraction": GPU_SHARE / users})

    def on_gpu(self) -> Self:
        """Return options with a GPU's default step sizes, as far as other options allow them.

        Not for modelled GPUs: without given sizes, these have the defaults of a CPU.
        """
        given, buckets = self.model_fields_set, self.token_buckets
        tokens, seqs = self.max_num_batched_tokens, self.max_num_seqs
        if "max_num_batched_tokens" not in given and buckets is None:
            tokens = max(GPU_TOKENS, seqs)
        if "max_num_seqs" not in given:
            least = buckets[0] if buckets else tokens
            seqs = min(GPU_SEQS, self.num_stages * tokens, least)
        return self.model_copy(update={"max_num_batched_tokens": tokens, "max_num_seqs": seqs})

    def model_post_init(self, context: Any, /) -> None:
        """Refuse combinations that cannot work."""
        stages = self.num_stages
        if stages * self.max_num_batched_tokens < self.max_num_seqs:
            share = f" by its {stages} stages" if stages > 1 else ""
            where = f"{stages} steps" if stages > 1 else "one step"
            raise OptionError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, must be at least "
                f"max_num_seqs, {self.max_num_seqs}{share}: every running request decodes in "
                f"{where}"
            )
        if self.eviction != Eviction() and not self.enable_prefix_caching:
            raise OptionError("eviction: is for enable_prefix_caching: true; it is false")
        buckets = self.token_buckets
        if buckets is not None and (
            sorted(set(buckets)) != list(buckets)
            or buckets[-1:] != (self.max_num_batched_tokens,)
            or buckets[0] < self.max_num_seqs
        ):
            raise OptionError(
                f"token_buckets is {list(buckets)}, must rise from max_num_seqs, "
                f"{self.max_num_seqs}, or more to max_num_batched_tokens, "
                f"{self.max_num_batched_tokens}"
            )
