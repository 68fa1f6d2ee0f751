"""Policies that form the batches of one instance."""

from collections.abc import Sequence

from pydantic import Field

from jaxinfer.options.validation import OptionError, Options
from jaxinfer.serving.batch_builder import BatchBuilder
from jaxinfer.serving.request_state import RequestState


def mixed(batch: BatchBuilder) -> None:
    """Add decodes first, then chunks of running prompts, then newly admitted prompts.

    The instance's token budget limits the sum. This is chunked prefill, as in Sarathi-Serve.
    """
    _run_on(batch)
    while batch.budget and (admitted := batch.admit()):
        batch.add_chunk(admitted)


class MixedOptions(Options):
    """Options of ``Mixed``.

    Attributes:
        enough_tokens: Once a step has this many tokens, decodes included, it takes no further
            prompt; the prompt that reaches the number is not cut there. By default the token budget
            ends the step.
        whole_prompts: Whether prompts are computed whole: a prompt that does not fit into the rest
            of the budget waits. One that is larger than the whole budget runs alone, in chunks.
        wait_steps: Largest number of decode steps for which prompts wait for other prompts.
        wait_share: Share of the token budget at which waiting prompts stop waiting.
        admit_after_preemption: Whether a step that preempts a request may take in waiting ones.
    """

    enough_tokens: int | None = Field(default=None, ge=1)
    whole_prompts: bool = False
    wait_steps: int = Field(default=0, ge=0)
    wait_share: float = Field(default=1.0, gt=0, le=1)
    admit_after_preemption: bool = True

    def model_post_init(self, context: object, /) -> None:
        """Refuse a share without a wait."""
        if "wait_share" in self.model_fields_set and not self.wait_steps:
            raise OptionError(f"wait_share is {self.wait_share}, has no use without wait_steps")


class Mixed:
    """Add decodes first, then chunks of running prompts, then newly admitted prompts.

    The token budget limits the sum. This is chunked prefill, as in Sarathi-Serve and vLLM. With
    ``whole_prompts``, batches are those of TensorRT-LLM without chunking; with ``enough_tokens``,
    those of SGLang with mixed chunks.
    """

    Options = MixedOptions
    plain = staticmethod(mixed)

    def __init__(self, options: MixedOptions) -> None:
        self._options, self._waited = options, 0

    def __call__(self, batch: BatchBuilder) -> None:
        """Form the batch."""
        before = batch.instance.num_preemptions
        prefills = _add_decodes(batch)
        if self._options.wait_steps and self._waits(batch, prefills):
            return
        for request in prefills:
            if not (self._goes_on(batch) and self._add(batch, request)):
                return
        preempted = batch.instance.num_preemptions > before
        if preempted and not self._options.admit_after_preemption:
            return
        while self._goes_on(batch):
            alone = batch.budget == batch.instance.options.max_num_batched_tokens
            limit = batch.budget if self._options.whole_prompts and not alone else None
            if not (admitted := batch.admit(limit)):
                return
            self._add(batch, admitted)

    def _goes_on(self, batch: BatchBuilder) -> bool:
        """Tell whether a further prompt may be added."""
        taken = batch.instance.options.max_num_batched_tokens - batch.budget
        enough = self._options.enough_tokens
        return batch.budget > 0 and (enough is None or taken < enough)

    def _add(self, batch: BatchBuilder, request: RequestState) -> bool:
        """Add a prompt; return False if it and the following ones have to wait."""
        whole = batch.instance.options.max_num_batched_tokens
        todo = request.leg_goal - request.launched
        if self._options.whole_prompts and todo > batch.budget < whole:
            return False
        batch.add_chunk(request)
        return True

    def _waits(self, batch: BatchBuilder, prefills: Sequence[RequestState]) -> bool:
        """Tell whether prompts should wait for other prompts while decodes run."""
        instance, options = batch.instance, self._options
        whole = instance.options.max_num_batched_tokens
        decodes = whole - batch.budget
        seats = instance.options.max_num_seqs - instance.num_running
        coming = [r for r in instance.waiting if r.exported is None][: max(seats, 0)]
        if not (prefills or coming):
            return False
        tokens = decodes
        for request in (*prefills, *coming):
            todo = request.num_known - request.computed
            if tokens + todo > whole:
                break
            tokens += todo
        enough = tokens >= options.wait_share * whole or self._waited >= options.wait_steps
        self._waited = 0 if enough or not decodes else self._waited + 1
        return self._waited > 0


def even_decodes(batch: BatchBuilder) -> None:
    """Form batches as ``mixed`` does, but limit each pipeline step to its share of the requests.

    Otherwise the steps in flight become uneven: if two are formed at once, the first one takes all
    ready requests, and a pipeline is as slow as its largest step.
    """
    instance = batch.instance
    steps = 1 if instance.options.launch_ahead else instance.options.max_in_flight
    _run_on(batch, -(-len(instance.taking_part) // steps))
    while batch.budget and (admitted := batch.admit()):
        batch.add_chunk(admitted)


def one_batch(batch: BatchBuilder) -> None:
    """Admit requests only when none runs: a batch stays together until all its requests have ended.

    FasterTransformer serves this way; here, each request also frees its pages when it ends.
    """
    if batch.instance.is_idle:
        while batch.admit():
            pass
    _run_on(batch)


class PrefillFirstOptions(Options):
    """Options of ``PrefillFirst``.

    Attributes:
        prefill_tokens: Largest number of prompt tokens per step; by default the token budget.
        cut_last: Whether the last prompt of a step may be cut to fit; otherwise it waits.
    """

    prefill_tokens: int | None = Field(default=None, ge=1)
    cut_last: bool = False


class PrefillFirst:
    """Compute whole prompts if there are any, else all decodes; never both in one step.

    This is how vLLM worked before chunked prefill, and how SGLang works with ``cut_last``. A prompt
    above the limit runs alone, cut by the token budget. A preempted request is recomputed like a
    prompt. While a decode waits for pages, prompts wait, since they would take those pages.
    """

    Options = PrefillFirstOptions

    def __init__(self, options: PrefillFirstOptions) -> None:
        self._limit, self._cuts = options.prefill_tokens, options.cut_last
        self._lacks_pages = False

    def __call__(self, batch: BatchBuilder) -> None:
        """Form the batch."""
        if self._lacks_pages:
            self._lacks_pages = bool(_decode(batch))
            if self._lacks_pages or batch.rows or batch.grouped:
                return  # Otherwise, the request that waited for pages is paused or has left.
        self._add_prompts(batch)
        if not batch.rows:
            self._lacks_pages = bool(_decode(batch))

    def _add_prompts(self, batch: BatchBuilder) -> None:
        left = min(self._limit or batch.budget, batch.budget, batch.prompt_budget)
        for request in batch.ungrouped():
            if catches_up(request) and self._takes(batch, request, left):
                left -= batch.rows[-1].count
        while left > 0 and (
            admitted := batch.admit(left if batch.rows and not self._cuts else None)
        ):
            if catches_up(admitted) and self._takes(batch, admitted, left):
                left -= batch.rows[-1].count

    def _takes(self, batch: BatchBuilder, request: RequestState, left: int) -> bool:
        """Add a prompt, whole unless it is the first one or may be cut."""
        todo = request.leg_goal - request.launched
        if self._cuts:
            return left > 0 and batch.add(request, min(todo, left))
        if batch.rows and todo > left:
            return False
        return batch.add_chunk(request)


class WholePromptsOptions(Options):
    """Options of ``WholePrompts``. The defaults are Splitwise's.

    Attributes:
        step_tokens: Largest number of tokens of one step, prompts and decodes together.
        max_skips: Largest number of steps in a row that may leave out a decode.
    """

    step_tokens: int = Field(default=2048, ge=1)
    max_skips: int = Field(default=4, ge=1)


class WholePrompts:
    """Add as many whole prompts as fit into a step, and fill the rest with decodes.

    A longer prompt runs alone. A decode that was left out too often goes first. This is Splitwise's
    machine-level scheduler (section IV-B).
    """

    Options = WholePromptsOptions

    def __init__(self, options: WholePromptsOptions) -> None:
        self._tokens, self._max_skips = options.step_tokens, options.max_skips
        self._skipped: dict[str, int] = {}

    def __call__(self, batch: BatchBuilder) -> None:
        """Form the batch."""
        budget, limit = batch.budget, self._tokens
        batch.budget = min(budget, limit)
        for request in batch.ungrouped() if self._skipped else ():
            overdue = self._skipped.get(request.id, 0) >= self._max_skips
            if overdue and batch.budget > 0 and not catches_up(request):
                _add_decode(batch, request)
        for request in batch.ungrouped():
            if catches_up(request):
                self._add_prompt(batch, request, budget)
        while batch.budget > 0 and (admitted := batch.admit(batch.budget if batch.rows else None)):
            if catches_up(admitted):
                self._add_prompt(batch, admitted, budget)
        self._fill(batch)

    def _add_prompt(self, batch: BatchBuilder, request: RequestState, budget: int) -> None:
        todo = request.leg_goal - request.launched
        if todo <= batch.budget:
            batch.add_chunk(request)
        elif not batch.rows:
            within, batch.budget = batch.budget, budget
            # The prompt is alone, and whole if the instance's limits allow that.
            batch.budget = 0 if batch.add_chunk(request) else within

    def _fill(self, batch: BatchBuilder) -> None:
        # If there is no room for all of them, each becomes a row, which can be left out.
        batch.add_group()
        rows = {row.request.id for row in batch.rows}
        skipped = {}
        for request in batch.ungrouped():
            if request.id in rows or catches_up(request) or not _is_ready(batch, request):
                continue
            if batch.budget <= 0 or not _add_decode(batch, request):
                skipped[request.id] = self._skipped.get(request.id, 0) + 1
        self._skipped = skipped


def catches_up(request: RequestState) -> bool:
    """Tell whether a request has prompt tokens, or lost tokens, to compute before it decodes."""
    launched = request.launched
    return launched < request.prompt_len or launched + 1 < request.num_known + request.pending


def _run_on(batch: BatchBuilder, most: int | None = None) -> None:
    """Add at most ``most`` running decodes, then running prefill chunks."""
    for request in _add_decodes(batch, most):
        if batch.budget:
            batch.add_chunk(request)


def _add_decodes(batch: BatchBuilder, most: int | None = None) -> list[RequestState]:
    """Add at most ``most`` running decodes; return requests with several tokens to compute."""
    batch.add_group(most)
    left = batch.budget if most is None else most - batch.grouped
    prefills: list[RequestState] = []
    for request in batch.ungrouped():
        todo, launched = 1, request.launched
        # Most rows are decodes of a last leg with one token; asking would cost more than the rest.
        if (
            launched + 1 != request.prompt_len + len(request.output_token_ids)
            or launched >= request.peak_tokens
            or request.legs[0].until is not None
        ):
            todo = request.leg_goal - launched
        if todo > 1:
            prefills.append(request)
        elif todo and batch.budget and left > 0:
            left -= batch.add(request, 1)
    return prefills


def _decode(batch: BatchBuilder) -> list[RequestState]:
    """Add all running decodes; return those that were ready but got no pages."""
    batch.add_group()
    ready = [
        request
        for request in batch.ungrouped()
        if not catches_up(request) and _is_ready(batch, request)
    ]
    added = [request for request in ready if batch.budget > 0 and batch.add(request, 1)]
    if batch.budget <= 0:
        return []
    return [request for request in ready if request.hold and request not in added]


def _add_decode(batch: BatchBuilder, request: RequestState) -> bool:
    return _is_ready(batch, request) and batch.add(request, 1)


def _is_ready(batch: BatchBuilder, request: RequestState) -> bool:
    """Tell whether a decode has a token to compute now."""
    if request.hold is None or request.paused or request.slice_move:
        return False
    if request.pending and not batch.instance.options.launch_ahead:
        return False
    return request.leg_goal > request.launched
