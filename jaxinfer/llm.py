"""Offline inference in Python: ``LLM(model).generate(prompts)``."""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

from jaxinfer.checkpoints.checkpoint import open_checkpoint
from jaxinfer.checkpoints.generation import read_generation
from jaxinfer.config.engine import EngineOptions
from jaxinfer.config.resolve import resolve
from jaxinfer.config.run_file import RunFile, load_run_file
from jaxinfer.errors import JaxinferError
from jaxinfer.options.validation import within
from jaxinfer.report.metrics import RunMetrics
from jaxinfer.report.progress import LoadProgress
from jaxinfer.report.run_folder import PROFILE_FILES
from jaxinfer.request import RequestOutput, SamplingParams
from jaxinfer.runtime.cluster import Engine, load_cluster
from jaxinfer.runtime.processes.process_group import Progress
from jaxinfer.runtime.profiling.profile import Needs, prepare_times, profile_name
from jaxinfer.runtime.profiling.profile_attention import prepare_attention
from jaxinfer.runtime.requests import AskedPrompts, Encode, RequestMaker
from jaxinfer.runtime.session import Session
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.world import StepDone
from jaxinfer.steps.attention_profile import profile_files
from jaxinfer.text.prompts import (
    Messages,
    Params,
    Prompt,
    each_conversation,
    each_prompt,
    iterable,
    model_name,
    text_or_token_ids,
)
from jaxinfer.text.tokenizer import load_tokenizer
from jaxinfer.workload.conversation import read_conversation
from jaxinfer.workload.order import Order, requests_in_order
from jaxinfer.workload.predictor import real_predictor


class LLM:
    """A language model on this process's first devices.

    Threads may share it; their calls are served one after the other.

    Args:
        model: the demo name ``smollm2-135m-instruct``, a ``.gguf`` file, a folder (converted, or
            Hugging Face's with safetensors), or a hub id.
        progress: show loading and compiling on stderr.
        engine_options: see ``EngineOptions``.

    Raises:
        JaxinferError: an option is unknown or wrong, or the model cannot be loaded.
    """

    def __init__(
        self, model: str | os.PathLike[str], *, progress: bool = True, **engine_options: Any
    ) -> None:
        name = model_name(model)
        options = EngineOptions(**engine_options)
        with LoadProgress(progress) as bar:
            self._load(RunFile(model=name, engine=options), bar.update)

    def _load(self, config: RunFile, progress: Progress) -> Needs:
        """Load everything except step times; return whether those are needed."""
        site = resolve(config)
        config.workload.check_real()
        for name, instance in site.cluster.instances.items():
            try:
                instance.check_real()
            except JaxinferError as error:
                raise within(f"instances.{name}", error) from None
        new_predictor = partial(real_predictor, config.workload.predictor)
        new_predictor()  # An invalid value is refused before anything is loaded.
        self.config = config
        self.model = config.require_model()
        checkpoint = open_checkpoint(self.model, site.cluster.load_format)
        self.generation = read_generation(checkpoint, config.engine.generation_config)
        is_dummy = site.cluster.load_format == "dummy"
        self.tokenizer = load_tokenizer(checkpoint, not is_dummy, self.generation.eos_token_ids)
        self.vocab_size = checkpoint.config.vocab_size
        verify, transport = config.verify_transfers, config.transport
        self.cluster = load_cluster(
            checkpoint, site.cluster, progress, site.pairs, verify, transport
        )
        longest = min(engine.plan.max_model_len for engine in self.cluster.engines.values())
        self._maker = RequestMaker(self.tokenizer, self.vocab_size, longest, config.engine.seed)
        self._ids = map(str, count())
        self._runs = Session(site, self.cluster, self.tokenizer, config.watchdog_s, new_predictor)
        return Needs(self.cluster, self.model, site.needs_fits, site.needs_attention_fits)

    @property
    def engine(self) -> Engine:
        """The first instance; usually the only one."""
        return next(iter(self.cluster.engines.values()))

    @classmethod
    def from_config(cls, run_file: str | Path | RunFile, *, progress: bool = True) -> "LLM":
        """Make an LLM with the model, cluster and system of a run file.

        Raises:
            JaxinferError: as the constructor, or the run file is wrong or names no model.
        """
        if not isinstance(run_file, RunFile):
            run_file = load_run_file(run_file)
        return cls.load_all({"": run_file}, progress=progress)[""]

    @classmethod
    def load_all(cls, configs: Mapping[str, RunFile], *, progress: bool = True) -> "dict[str, LLM]":
        """Load several LLMs at once, under the keys of ``configs``; any profiling is done in turn.

        Raises:
            JaxinferError: see ``from_config``.
        """
        llms = {name: cls.__new__(cls) for name in configs}
        with LoadProgress(progress) as bar:
            needs = {}
            for name, llm in llms.items():
                progress_of = partial(bar.update_of, name) if len(llms) > 1 else bar.update
                needs[name] = llm._load(configs[name], progress_of)
            for name, fits in prepare_times(needs, bar.update).items():
                llms[name]._runs.fits = fits
            prepare_attention(needs, bar.update)
        return llms

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: Params | None = None,
        *,
        progress: bool = True,
        run_dir: str | Path | None = None,
        order: Order = "given",
    ) -> list[RequestOutput]:
        """Continue each prompt.

        Args:
            prompts: texts, or ``{"prompt_token_ids": [...]}``; one or several.
            sampling_params: one for all, or one per prompt; by default
                ``get_default_sampling_params()``.
            progress: show a bar on stderr.
            run_dir: a new numbered folder below it gets ``run.json`` and ``steps.jsonl``.
            order: ``prefix_tree`` serves prompts with a common prefix one after the other, so that
                the prefix cache has it; ``blend`` also mixes prompts into the steps of long
                outputs.

        Returns:
            One output per prompt, in the prompts' order. If the KV pool could never hold a
            request, its output has ``error`` set; all others are served.

        Raises:
            JaxinferError: a prompt is invalid; the message gives its index, and no prompt has been
                run.
        """
        asked = self._asked(each_prompt(prompts), self._encode, sampling_params)
        return self._all_outputs(asked, progress, run_dir, order)

    def generate_iter(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: Params | None = None,
        *,
        progress: bool = True,
        run_dir: str | Path | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Continue each prompt, as ``generate`` does; each output comes as soon as it is finished.

        Outputs come in the order in which they finish. ``prompt_index`` is the index of an output's
        prompt, so ``sorted(outputs, key=lambda output: output.prompt_index)`` restores the prompts'
        order. Prompts (and their sampling parameters, if each has its own) may be an iterator: they
        are read during the run (see ``run``), and an invalid prompt ends the run when it is read.

        The run makes progress in the caller's thread, while the caller waits for an output; nothing
        is launched in between. It ends with the last output, or when the iterator is closed, for
        example by leaving a ``for`` loop over it. Steps in flight are then waited for, their KV and
        the prefix cache are given up, and this LLM is free for the next run.
        """
        asked = self._asked(each_prompt(prompts), self._encode, sampling_params)
        return self._outputs(asked, progress, run_dir)

    def chat(
        self,
        messages: Messages | Iterable[Messages],
        sampling_params: Params | None = None,
        *,
        progress: bool = True,
        run_dir: str | Path | None = None,
    ) -> list[RequestOutput]:
        """Answer one or several conversations, as ``generate`` continues prompts.

        Args:
            messages: lists of ``{"role": ..., "content": ...}``. A content is a text, or a list of
                parts, ``{"type": "text", "text": ...}``, as in a line of a batch.
        """
        asked = self._asked(each_conversation(messages), self._encode_chat, sampling_params)
        return self._all_outputs(asked, progress, run_dir)

    def chat_iter(
        self,
        messages: Messages | Iterable[Messages],
        sampling_params: Params | None = None,
        *,
        progress: bool = True,
        run_dir: str | Path | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Answer conversations as ``chat`` does, and yield outputs as ``generate_iter`` does."""
        asked = self._asked(each_conversation(messages), self._encode_chat, sampling_params)
        return self._outputs(asked, progress, run_dir)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters that are used if a call has none.

        See ``EngineOptions.generation_config``.
        """
        return self.generation.params()

    def make_requests(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> list[RequestState]:
        """Make ``params.n`` requests for ``run``, and choose their seeds and largest outputs.

        Raises:
            JaxinferError: there are no tokens, too many, or some outside the vocabulary; or
                ``params`` is not a ``SamplingParams``.
        """
        try:
            return self._maker.make(request_id, prompt_token_ids, params)
        except JaxinferError as error:
            raise JaxinferError(f"request {request_id!r}: {error}") from None

    def requests_of_line(
        self, custom_id: str, prompt_token_ids: Sequence[int], given: SamplingParams
    ) -> list[RequestState]:
        """Make the requests for a batch line; options that it lacks are the model's defaults."""
        return self._maker.make(custom_id, prompt_token_ids, self.generation.complete(given))

    def run(
        self,
        requests: Iterable[RequestState],
        on_output: Callable[[RequestOutput], None],
        *,
        progress: bool = True,
        run_dir: str | Path | None = None,
        on_step: Callable[[StepDone], None] = lambda done: None,
        num_requests: int = 0,
        about: Mapping[str, object] | None = None,
    ) -> RunMetrics:
        """Serve requests made by ``make_requests``; outputs and steps come as they finish.

        The requests of a list arrive at their ``arrival``. Any iterable without a length is read
        during the run, so it may be larger than memory. The run reads until the number of
        unfinished requests is twice the number that all instances run at once (``max_num_seqs``),
        plus 16; of finished requests, only the ids are kept. A request that is read after its
        ``arrival`` arrives when it is read. One with ``after_ends`` arrives ``arrival`` seconds
        after that many prompts of the run have ended. Continuations of one prompt must follow
        one another.

        Args:
            num_requests: number of prompts that will come, for the progress bar, if known.
            about: additional entries of ``run.json``, as JSON values.

        Raises:
            JaxinferError: two requests have one id, or one has already run; this is called from
                ``on_output`` or ``on_step``; or ``strict_shapes`` is set and a step was not
                compiled ahead.
        """
        with self._runs.alone():
            requests = iterable("requests", requests)
            return self._runs.run(
                requests,
                on_output,
                lambda: self.describe() | dict(about or {}),
                progress,
                run_dir,
                on_step,
                num_requests,
            )

    def reset_prefix_cache(self) -> None:
        """Forget all KV of earlier runs.

        Raises:
            JaxinferError: this is called during a run.
        """
        with self._runs.alone():
            self._runs.kv = {}

    def describe(self) -> dict[str, object]:
        """Describe the placement of all instances, as JSON values."""
        profiles = {
            name: profile_name(engine, self.model) for name, engine in self.cluster.engines.items()
        }
        return {
            "model": self.model,
            "system": dict(self.config.system),
            "ttft_counts_transfer": self._runs.site.counts_transfer,
            "emulated": self.cluster.config.emulated,
            "run_file": self.config.model_dump(mode="json", exclude_unset=True),
            "instances": {
                name: described | {"profile": profiles[name]}
                for name, described in self.cluster.describe().items()
            },
            "measured_gb_s": dict(self.cluster.measured_gb_s),
            "transports": self.cluster.transports,
            "default_sampling": dict(self.generation.defaults),
            PROFILE_FILES: profile_files(profiles.values()),
        }

    def _encode(self, prompt: object) -> tuple[str | None, list[int]]:
        found = text_or_token_ids(prompt)
        return (found, self.tokenizer.encode(found)) if isinstance(found, str) else (None, found)

    def _encode_chat(self, conversation: object) -> tuple[None, list[int]]:
        return None, self.tokenizer.encode_chat(read_conversation(conversation).messages)

    def _asked(self, prompts: Iterable[Any], encode: Encode, params: Params | None) -> AskedPrompts:
        params = self.get_default_sampling_params() if params is None else params
        return AskedPrompts(self._ids, self._maker.make, prompts, encode, params)

    def _all_outputs(
        self,
        asked: AskedPrompts,
        progress: bool,
        run_dir: str | Path | None,
        order: Order = "given",
    ) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        with self._runs.alone():
            requests = requests_in_order(asked.requests(), order)
            self._runs.run(requests, outputs.append, self.describe, progress, run_dir)
        return sorted(map(asked.answered, outputs), key=lambda output: output.prompt_index)

    def _outputs(
        self, asked: AskedPrompts, progress: bool, run_dir: str | Path | None
    ) -> Generator[RequestOutput, None, None]:
        found: deque[RequestOutput] = deque()
        with self._runs.alone():
            requests, known = asked.requests(), asked.num_known
            rounds = self._runs.rounds(
                requests, found.append, self.describe, progress, run_dir, num_requests=known
            )
            with closing(rounds):
                for _ in chain(rounds, [None]):  # The last round ends without a stop.
                    while found:
                        yield asked.answered(found.popleft())
                        self._runs.resume()
