"""vLLM's own scheduler, with the loop that an engine has around it; for vLLM's Python."""

import heapq
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from scripts.validate.vllm_scheduler.rules import (
    ABORT,
    ARRIVAL,
    END_TOKEN,
    STEP_END,
    output_token,
    prompt_tokens,
    shown_rows,
    step_us,
)

MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000,
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 1 << 20, "rms_norm_eps": 1e-5, "torch_dtype": "float32",
}  # fmt: skip
LONGEST = 1 << 17

init_none_hash(sha256)


def new_scheduler(workload: Mapping[str, Any], folder: str) -> Any:
    """Make the scheduler that an engine with these options has."""
    model = ModelConfig(
        model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=LONGEST
    )
    options = SchedulerConfig(
        max_num_seqs=workload["seqs"],
        max_num_batched_tokens=workload["budget"],
        max_model_len=LONGEST,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        async_scheduling=workload["ahead"],
        watermark=workload["watermark"],
    )
    size = workload["block"]
    cache = CacheConfig(block_size=size, enable_prefix_caching=workload["caching"])
    config = VllmConfig(
        model_config=model,
        scheduler_config=options,
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
    )
    cache.num_gpu_blocks = workload["blocks"]
    spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    pool = KVCacheConfig(
        num_blocks=workload["blocks"],
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    kind = AsyncScheduler if workload["ahead"] else Scheduler
    return kind(
        vllm_config=config,
        kv_cache_config=pool,
        structured_output_manager=StructuredOutputManager(config),
        block_size=size,
    )


class Engine:
    """The loop around a scheduler, as vLLM's ``EngineCore`` has it, with a clock of its own."""

    def __init__(self, workload: Mapping[str, Any], folder: str) -> None:
        self.workload = workload
        self.scheduler = new_scheduler(workload, folder)
        self.hasher = get_request_block_hasher(workload["block"], sha256)
        self.events: list[tuple[int, int, int, Any]] = []
        self.asked: dict[str, Any] = {}
        self.in_flight: deque[tuple[Any, list[list[int]]]] = deque()
        self.free_at = self.launched = self.empty_at = 0
        self.victims: list[str] = []
        self.ended: dict[str, int] = {}
        preempt = self.scheduler._preempt_request

        def noted(request: Any, *rest: Any, **more: Any) -> None:
            self.victims.append(request.request_id)
            preempt(request, *rest, **more)

        self.scheduler._preempt_request = noted
        for number, each in enumerate(workload["requests"]):
            heapq.heappush(self.events, (each["at"], ARRIVAL, number, each))
            if each["abort"]:
                heapq.heappush(self.events, (each["abort"], ABORT, number, each))

    def run(self) -> Iterator[list[Any]]:
        """Yield the decisions, until the events or the batches that were asked for are over."""
        limit = 2 if self.workload["ahead"] else 1
        while self.events:
            now = self.events[0][0]
            while self.events and self.events[0][0] == now:
                self.take(*heapq.heappop(self.events)[1:])
            while len(self.in_flight) < limit:
                # An empty batch keeps its place in the engine's queue until a step has ended.
                if self.in_flight and self.empty_at == len(self.in_flight):
                    break
                if not self.scheduler.get_num_unfinished_requests():
                    break
                seen = len(self.victims)
                output = self.scheduler.schedule()
                self.empty_at = 0
                if output.total_num_scheduled_tokens:
                    yield self.launch(now, output)
                    if self.launched == self.workload["batches"]:
                        return
                elif self.in_flight or len(self.victims) == seen:
                    self.empty_at = len(self.in_flight)
                    break

    def take(self, kind: int, number: int, what: Any) -> None:
        """Take in an event."""
        if kind == ARRIVAL:
            self.asked[what["id"]] = what
            params = SamplingParams(
                max_tokens=what["max"], stop_token_ids=[END_TOKEN], ignore_eos=True
            )
            tokens = prompt_tokens(*what["prompt"])
            at, hasher = what["at"], self.hasher
            self.scheduler.add_request(
                Request(what["id"], tokens, params, None, arrival_time=at, block_hasher=hasher)
            )
        elif kind == ABORT:
            for each in self.scheduler.finish_requests(what["id"], RequestStatus.FINISHED_ABORTED):
                self.ended[each.request_id] = each.num_output_tokens
        else:
            output, sampled = self.in_flight.popleft()
            names = list(output.num_scheduled_tokens)
            there = {name: self.scheduler.requests.get(name) for name in names}
            self.scheduler.update_from_output(
                output,
                ModelRunnerOutput(
                    req_ids=names,
                    req_id_to_index={name: index for index, name in enumerate(names)},
                    sampled_token_ids=sampled,
                ),
            )
            for name, request in there.items():
                if request is not None and request.is_finished():
                    self.ended[name] = request.num_output_tokens

    def launch(self, now: int, output: Any) -> list[Any]:
        """Start a step, and return the decision that it is."""
        requests = self.scheduler.requests
        rows: list[tuple[str, int]] = []
        sampled: list[list[int]] = []
        for name, count in output.num_scheduled_tokens.items():
            rows.append((name, count))
            request, what = requests[name], self.asked[name]
            if request.is_prefill_chunk:
                sampled.append([])
                continue
            length = what["prompt"][3]
            # What has been computed by the end of this step, less the prompt, is the token's index.
            index = request.num_computed_tokens - length
            sampled.append([output_token(what["out"], length, index, what["stop"])])
        cached = output.scheduled_cached_reqs
        begun = {each.req_id: each.num_computed_tokens for each in output.scheduled_new_reqs}
        for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if name in cached.resumed_req_ids:
                begun[name] = computed
        admitted = [[name, begun[name]] for name, _ in rows if name in begun]
        tokens = sum(count for _, count in rows)
        self.free_at = max(now, self.free_at) + step_us(self.launched, tokens, len(rows))
        self.launched += 1
        heapq.heappush(self.events, (self.free_at, STEP_END, self.launched, None))
        self.in_flight.append((output, sampled))
        victims, self.victims = self.victims, []
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return [now, shown_rows(rows, self.workload["counts_only"]), admitted, victims, free]
