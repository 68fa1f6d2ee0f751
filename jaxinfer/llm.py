"""Offline inference in Python: ``LLM(model).generate(prompts)``."""

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from jaxinfer.config import RunFile, load_run_file
from jaxinfer.continuations import Continuations
from jaxinfer.errors import JaxinferError
from jaxinfer.options import EngineOptions
from jaxinfer.prompts import (
    Messages,
    Params,
    Prompt,
    check_params,
    listed,
    listed_conversations,
    listed_prompts,
    model_name,
    paired,
    text_or_token_ids,
    token_ids,
)
from jaxinfer.report.metrics import RunMetrics, RunTotals, run_metrics
from jaxinfer.report.progress import LoadProgress, RunProgress
from jaxinfer.report.run_folder import RunFolder
from jaxinfer.request import RequestOutput, Sampling, SamplingParams
from jaxinfer.runtime.checkpoint import open_checkpoint
from jaxinfer.runtime.engine import Engine, Progress, load_cluster
from jaxinfer.runtime.profile import Needs, prepare_times, profile_name
from jaxinfer.runtime.sampling_inputs import sampling_of
from jaxinfer.runtime.world import RealWorld
from jaxinfer.serving.loop import ServingLoop, Stop
from jaxinfer.serving.page_pool import KVShards
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.step_fit import StepFit
from jaxinfer.serving.world import Event, InstanceLost, StepDone, TransferDone
from jaxinfer.stop import StopCheck, completion, decoded
from jaxinfer.systems.registry import make_system
from jaxinfer.tokenizer import load_tokenizer
from jaxinfer.workload.conversation import read_conversation


class LLM:
    """A language model on this process's first devices.

    It may be shared by threads; their calls are served one after the other.

    Args:
        model: the demo name ``smollm2-135m-instruct``, a ``.gguf`` file, a folder (converted, or
            Hugging Face's with safetensors), or a hub id.
        progress: show loading and compiling on stderr.
        engine_options: see ``EngineOptions``.

    Raises:
        JaxinferError: an unknown or wrong option, or a model that cannot be loaded.
    """

    def __init__(
        self, model: str | os.PathLike[str], *, progress: bool = True, **engine_options: Any
    ) -> None:
        name = model_name(model)
        options = EngineOptions(**engine_options)
        with LoadProgress(progress) as bar:
            self._load(RunFile(model=name, engine=options), bar.update)

    def _load(self, config: RunFile, progress: Progress) -> Needs:
        """All but the times of steps, which it says whether it needs."""
        cluster = config.cluster()
        system = make_system(config.system, cluster.instances)
        self.config = config
        self.model = config.require_model()
        self.ttft_counts_transfer = config.metrics.counts_transfer(system)
        checkpoint = open_checkpoint(self.model, cluster.load_format)
        self.tokenizer = load_tokenizer(checkpoint, required=cluster.load_format != "dummy")
        self.vocab_size = checkpoint.config.vocab_size
        pairs = system.routes(cluster.instances)
        self.cluster = load_cluster(checkpoint, cluster, progress, pairs, config.verify_transfers)
        self._fits: Mapping[str, StepFit] = {}
        self._num_requests = 0
        self._kv: dict[str, KVShards] = {}
        self._lost: dict[str, str] = {}
        self._lock = threading.RLock()
        self._is_running = False
        return Needs(self.cluster, self.model, system.needs_fits)

    @property
    def engine(self) -> Engine:
        """The first instance; mostly there is but one."""
        return next(iter(self.cluster.engines.values()))

    @classmethod
    def from_config(cls, run_file: str | Path | RunFile, *, progress: bool = True) -> "LLM":
        """Build from a run file's model, cluster and system.

        Raises:
            JaxinferError: as the constructor, or the run file is wrong or names no model.
        """
        if not isinstance(run_file, RunFile):
            run_file = load_run_file(run_file)
        return cls.load_all({"": run_file}, progress=progress)[""]

    @classmethod
    def load_all(cls, configs: Mapping[str, RunFile], *, progress: bool = True) -> "dict[str, LLM]":
        """Several at once, by what to call them; what they profile, they profile in turns.

        Raises:
            JaxinferError: as ``from_config``.
        """
        llms = {name: cls.__new__(cls) for name in configs}
        with LoadProgress(progress) as bar:
            needs = {}
            for name, llm in llms.items():
                progress_of = partial(bar.update_of, name) if len(llms) > 1 else bar.update
                needs[name] = llm._load(configs[name], progress_of)
            for name, fits in prepare_times(needs, bar.update).items():
                llms[name]._fits = fits
        return llms

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: Params = None,
        *,
        progress: bool = True,
        run_dir: str | Path | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt.

        Args:
            prompts: texts, or ``{"prompt_token_ids": [...]}``; one or several.
            sampling_params: one for all, or one per prompt.
            progress: show a bar on stderr.
            run_dir: a new numbered folder below it gets ``run.json`` and ``steps.jsonl``.

        Returns:
            One output per prompt, in their order. A request that the KV pool could never hold
            has ``error`` set; the rest is served.

        Raises:
            JaxinferError: a prompt that cannot be run, named by its index, before any is run.
        """

        def encode(prompt: object) -> tuple[str | None, list[int]]:
            found = text_or_token_ids(prompt)
            return (
                (found, self.tokenizer.encode(found)) if isinstance(found, str) else (None, found)
            )

        many = listed_prompts(prompts)
        return self._generate(many, encode, sampling_params, progress, run_dir)

    def chat(
        self,
        messages: Messages | Iterable[Messages],
        sampling_params: Params = None,
        *,
        progress: bool = True,
        run_dir: str | Path | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, as ``generate`` does prompts.

        Args:
            messages: lists of ``{"role": ..., "content": ...}``. A content is a text, or a list of
                parts, ``{"type": "text", "text": ...}``, as in a line of a batch.
        """

        def encode(conversation: object) -> tuple[None, list[int]]:
            return None, self.tokenizer.encode_chat(read_conversation(conversation).messages)

        many = listed_conversations(messages)
        return self._generate(many, encode, sampling_params, progress, run_dir)

    def make_requests(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> list[RequestState]:
        """``params.n`` requests for ``run``, their seeds and their longest output decided.

        Raises:
            JaxinferError: no tokens, tokens outside the vocabulary, or too many of them; or
                ``params`` are no ``SamplingParams``.
        """
        check_params(params)
        prompt_token_ids = token_ids(prompt_token_ids)
        limit = min(engine.plan.max_model_len for engine in self.cluster.engines.values())
        if not prompt_token_ids:
            raise JaxinferError("the prompt is empty")
        if len(prompt_token_ids) >= limit:
            raise JaxinferError(
                f"the prompt has {len(prompt_token_ids)} tokens, max_model_len is {limit}: "
                "there is no room for an output"
            )
        named = [*prompt_token_ids, *params.logit_bias, *params.stop_token_ids]
        if wrong := [token for token in named if not 0 <= token < self.vocab_size]:
            raise JaxinferError(
                f"token id {wrong[0]} is not in the vocabulary of {self.vocab_size}"
            )
        if params.stop:
            self.tokenizer.open_stream()  # Refuses where there is no tokenizer.
        seed = params.seed
        if seed is None:
            seed = _hash63(f"{self.config.engine.seed}/{request_id}")
        ends = () if params.ignore_eos else tuple(self.tokenizer.eos_token_ids)
        ends += params.stop_token_ids
        requests = []
        for index in range(params.n):
            # Such that no two requests with different ids get the same.
            suffixed = params.n > 1 or request_id.endswith(")")
            request = RequestState(
                id=f"{request_id} ({index + 1} of {params.n})" if suffixed else request_id,
                prompt_len=len(prompt_token_ids),
                max_tokens=min(params.max_tokens, limit - len(prompt_token_ids)),
                prompt_token_ids=prompt_token_ids,
                payload=Sampling(params, seed, ends, request_id, index),
            )
            request.takes_cached = params.prompt_logprobs is None
            requests.append(request)
            # The other continuations: seeds of their own, and the prompt reported on once.
            params = params.model_copy(update={"prompt_logprobs": None})
            seed = _hash63(f"{seed}#{index}")
        return requests

    def run(
        self,
        requests: Iterable[RequestState],
        on_output: Callable[[RequestOutput], None],
        *,
        progress: bool = True,
        run_dir: str | Path | None = None,
        on_step: Callable[[StepDone], None] = lambda done: None,
    ) -> RunMetrics:
        """Serve requests made by ``make_requests``; outputs and steps come as they finish.

        Raises:
            JaxinferError: two requests have one id, or one has been in a run; this is called from
                ``on_output`` or ``on_step``; or ``strict_shapes`` is set and a step was not
                compiled ahead.
        """
        with self._alone():
            return self._run(listed("requests", requests), on_output, progress, run_dir, on_step)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One run at a time: the next one has the same devices and KV."""
        with self._lock:
            if self._is_running:
                raise JaxinferError("this LLM is in the middle of a run: wait until it has ended")
            self._is_running = True
            try:
                yield
            finally:
                self._is_running = False

    def _run(
        self,
        requests: Sequence[RequestState],
        on_output: Callable[[RequestOutput], None],
        progress: bool,
        run_dir: str | Path | None,
        on_step: Callable[[StepDone], None],
    ) -> RunMetrics:
        for name, reason in self._lost.items():
            raise JaxinferError(f"instance {name} was lost, load the model again: {reason}")
        group = Continuations(requests, self.cluster.cached_page_size)
        checks = {r.id: StopCheck(sampling_of(r), self.tokenizer) for r in requests}
        self._compile_samplers(requests, progress)
        totals = RunTotals()
        with ExitStack() as stack:
            folder = None
            if run_dir:
                folder = stack.enter_context(RunFolder(Path(run_dir), self.describe()))
            bar = stack.enter_context(RunProgress(progress, group.num_parents))

            def check_stop(request: RequestState, token: int) -> Stop | None:
                return checks[request.id].add(token)

            def on_finish(request: RequestState) -> None:
                world.add(group.released_by(request))
                totals.add_request(request, request.metrics.delivered(self.ttft_counts_transfer))
                if folder:
                    folder.add_request(request, self.ttft_counts_transfer)
                if siblings := group.done_with(request):
                    on_output(self._output(siblings, checks))
                    bar.request_done()

            def on_event(event: Event) -> None:
                if isinstance(event, StepDone):
                    for row in event.batch.rows if group.held_back else ():
                        if row.samples:
                            world.add(group.released_by(row.request))
                    totals.add_step(event)
                    on_step(event)
                    bar.step_done(totals)
                    if folder:
                        folder.add_step(event, loop.hand_offs.moving)
                elif folder and isinstance(event, TransferDone):
                    folder.add_transfer(event, loop.instances)
                elif folder and isinstance(event, InstanceLost):
                    folder.lose_instance(event.instance)

            late = self.cluster.late_compiles
            self.cluster.take_overruns()  # Those of runs that nobody recorded.
            # A run that fails leaves pages in use: the next one gets new pools.
            engines = self.cluster.engines
            kv = self._kv or {name: engine.new_kv() for name, engine in engines.items()}
            self._kv = {}
            instances = [
                engine.new_instance(kv[name], self._fits.get(name))
                for name, engine in engines.items()
            ]
            system = make_system(self.config.system, engines)
            workers = {name: engine.worker for name, engine in engines.items()}
            world = RealWorld(workers, group.at_once, self.cluster.routes, self.config.watchdog_s)
            loop = ServingLoop(world, instances, system, check_stop, on_finish, on_event)
            loop.run()
            self._lost |= world.lost
            for shards in kv.values():
                shards.on_free = lambda: None  # The loop is not to outlive the run.
            self._kv = kv
            preemptions = sum(instance.num_preemptions for instance in instances)
            failed = {sampling_of(r).parent for r in requests if r.error}
            metrics = run_metrics(
                totals, group.num_parents, len(failed), world.now(),
                preemptions=preemptions,
                num_pages=sum(stage.plan.num_pages - 1 for stage in self.cluster.stages),
                compiles=sum(stage.step.compiles for stage in self.cluster.stages),
                compile_s=sum(stage.step.compile_s for stage in self.cluster.stages),
                late_compiles=self.cluster.late_compiles - late,
                waited_s=world.waited_s,
                launching_s=world.launching_s,
            )  # fmt: skip
            if folder:
                folder.finish(
                    asdict(metrics), self.cluster.take_overruns(), world.lost, system.report()
                )
        return metrics

    def reset_prefix_cache(self) -> None:
        """Forget all KV of earlier runs."""
        with self._lock:
            self._kv = {}

    def describe(self) -> dict[str, object]:
        """What runs where, as JSON values."""
        return {
            "model": self.model,
            "system": dict(self.config.system),
            "ttft_counts_transfer": self.ttft_counts_transfer,
            "emulated": self.cluster.config.emulated,
            "run_file": self.config.model_dump(mode="json", exclude_unset=True),
            "instances": {
                name: described | {"profile": profile_name(self.cluster.engines[name], self.model)}
                for name, described in self.cluster.describe().items()
            },
            "measured_gb_s": dict(self.cluster.measured_gb_s),
        }

    def _generate(
        self,
        prompts: Sequence[Any],
        encode: Callable[[Any], tuple[str | None, list[int]]],
        sampling_params: Params,
        progress: bool,
        run_dir: str | Path | None,
    ) -> list[RequestOutput]:
        texts: dict[str, str | None] = {}
        requests: list[RequestState] = []
        pairs = paired(prompts, sampling_params)
        outputs: dict[str, RequestOutput] = {}

        def on_output(output: RequestOutput) -> None:
            output.prompt = texts[output.request_id]
            outputs[output.request_id] = output

        with self._lock:
            for index, (prompt, params) in enumerate(pairs):
                request_id = str(self._num_requests + index)
                try:
                    texts[request_id], tokens = encode(prompt)
                    requests += self.make_requests(request_id, tokens, params)
                except JaxinferError as error:
                    raise JaxinferError(f"prompt {index}: {error}") from None
            self._num_requests += len(texts)
            self.run(requests, on_output, progress=progress, run_dir=run_dir)
        return [outputs[request_id] for request_id in texts]

    def _compile_samplers(self, requests: Sequence[RequestState], progress: bool) -> None:
        """What these requests' options need and no run before needed."""
        for engine in self.cluster.engines.values():
            left = engine.worker.prepare(requests)
            if total := next(left):
                with LoadProgress(progress) as bar:
                    bar.update("compiling samplers", total)
                    for count in left:
                        bar.update("compiling samplers", count)

    def _output(self, siblings: list[RequestState], checks: dict[str, StopCheck]) -> RequestOutput:
        first = siblings[0]
        failed = next((request for request in siblings if request.error), None)
        prompt_logprobs = None
        if sampling_of(first).params.prompt_logprobs is not None and not failed:
            found = (first.prompt_details[p] for p in range(1, first.prompt_len))
            prompt_logprobs = [None, *(decoded(position, self.tokenizer) for position in found)]
        return RequestOutput(
            request_id=sampling_of(first).parent,
            prompt=None,
            prompt_token_ids=list(first.prompt_token_ids),
            outputs=[
                completion(request, checks.pop(request.id), self.tokenizer)
                for request in siblings
                if not failed
            ],
            finished=True,
            metrics=first.metrics,
            prompt_logprobs=prompt_logprobs,
            error=failed.error if failed else None,
            lost=any(request.finish_reason == "lost" for request in siblings),
        )


def _hash63(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
