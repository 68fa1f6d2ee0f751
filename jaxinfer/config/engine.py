"""The options of one engine, for ``LLM``, run files and instances alike."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from jaxinfer.options.validation import OptionError, Options
from jaxinfer.serving.policies import PolicyOptions


class EngineOptions(Options):
    """How a model is run. Names follow vLLM where it has the option.

    Attributes:
        load_format: ``auto`` reads the model's weights; ``dummy`` draws them at random from
            ``seed``, so that ``config.json`` alone will do to measure speed.
        dtype: of weights and, by default, the KV cache; ``auto`` is float32 on CPU and bfloat16 on
            GPU. ``int8`` and ``fp8`` are weights of 8 bits beside a computation in bfloat16, of a
            modelled GPU only.
        kv_cache_dtype: ``int8`` or ``fp8`` (e4m3, on GPUs from sm_89 on) halve the KV cache, with
            a scale per page and head; ``auto`` is ``dtype``.
        tensor_parallel_size: devices that share each layer.
        sharding: a Python file whose ``RULES`` say how parameters lie on those devices, in
            place of those of ``jaxinfer.models.sharding``.
        page_size: tokens per KV page.
        num_pages: size of the KV pool, one padding page included; by default as many as
            ``memory_fraction`` allows and as could be of use.
        memory_fraction: of a GPU's memory, for weights and KV together (default 0.9); on CPU, of
            the memory available when the engine starts, for KV (default 0.2).
        max_num_seqs: requests that run at once, at most.
        max_num_batched_tokens: tokens computed in one step, at most.
        token_buckets: token counts for which steps with prefill are compiled, the largest of them
            ``max_num_batched_tokens``; by default down to 64, each a quarter of the next. A step
            costs as much as its bucket.
        max_model_len: prompt and output tokens of one request, at most; by default what the
            model was made for.
        enable_prefix_caching: keep full pages after a request's end, and start requests that
            begin alike with them.
        kernels: what attends: ``hopper`` (kernels for sm_90), ``generic`` (kernels for NVIDIA GPUs
            from sm_80 on), ``numba`` (on CPUs, with the extra ``[cpu]``; products of float32, too),
            ``plain`` (JAX), ``interpret`` (the generic kernels on any device, slowly, to check
            them); ``auto`` takes the first of these that the device can run, but ``plain`` on a GPU
            where entries are float32.
        launch_ahead: start a decode before the token it follows has reached the host.
        chunks_in_flight: of one prompt. ``all``: a chunk is launched before the last one has ended,
            so that a long prompt fills all pipeline stages; ``1``: it waits, as in Vidur and in
            vLLM before version 1.
        watermark: share of the pages that admission leaves free, so that the growth of what runs
            does not evict what has just come in.
        half_batches: whether a step is computed as two halves of its rows in turn where KV heads
            lie on attention groups, so that one half's exchange with these hides behind the other's
            dense layers: ``by_time`` where that takes less, by cost model or profile.
        max_transfers_in_flight: requests whose KV is fetched at once, at most.
        policies: order, admission, batches and victims: see ``PolicyOptions``.
        strict_shapes: a step that was not compiled ahead is an error.
        seed: requests without a seed of their own get one from this and their id; random weights
            are drawn from it.
    """

    load_format: Literal["auto", "dummy"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "int8", "fp8"] = "auto"
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = "auto"
    tensor_parallel_size: int = Field(default=1, ge=1)
    sharding: str | None = None
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
    kernels: Literal["auto", "plain", "numba", "generic", "hopper", "interpret"] = "auto"
    launch_ahead: bool = True
    chunks_in_flight: Literal[1, "all"] = "all"
    half_batches: Literal["never", "by_time", "always"] = "never"
    watermark: float = Field(default=0.01, ge=0, lt=1)
    max_transfers_in_flight: int = Field(default=4, ge=1)
    policies: PolicyOptions = PolicyOptions()
    strict_shapes: bool = False
    seed: int = Field(default=0, ge=0)

    @field_validator("dtype", mode="before")
    @classmethod
    def _no_half(cls, value: object) -> object:
        if value in ("float16", "fp16", "half"):
            raise ValueError(
                f"{value} is not supported: bfloat16 takes as much memory, float32 is exact"
            )
        return value

    @property
    def num_stages(self) -> int:
        """Pipeline stages: as many steps at once share the running requests."""
        return 1

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
