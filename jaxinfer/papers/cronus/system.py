"""Cronus: partially disaggregated prefill (section 4 of the paper).

The partial prefill instance (PPI, on the weak group) computes the first part of each prompt; the
chunked prefill instance (CPI, on the strong group) fetches that KV, computes the rest in chunks
together with its decodes, and decodes. The Balancer cuts each prompt so that both parts take the
same time.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice

from pydantic import Field

from jaxinfer.errors import JaxinferError
from jaxinfer.papers.cronus.balancer import Refined, balance, chunked_seconds, load_of
from jaxinfer.serving.step_fit import MixedFit, PrefillFit
from jaxinfer.serving.system import Action, Assignment, System
from jaxinfer.serving.views import ClusterView, HandOffRule, Leg, RequestView, StepView
from jaxinfer.systems.by_cache import ByCacheOptions, CachedParts
from jaxinfer.systems.instances import alive, check_roles, whole_on_least_loaded

# Number of cuts kept for the report, the first ones of a run: 12 MB.
REPORTED = 2**15


class CronusOptions(ByCacheOptions):
    """Options of ``Cronus``.

    Attributes:
        partial, chunked: Names of the two instances. A side of several GPUs is one instance with
            stages or tensor parallelism.
        max_in_partial: Largest number of requests in the partial instance. If it is small, each
            split uses recent statistics.
        candidates: Number of split points of a prompt that the Balancer tries.
        refine: Whether to fit the Balancer's coefficients again during the run.
        cut_share, cut_tokens: Fixed share or number of tokens of each prompt for the partial
            instance, instead of the Balancer's choice.
        hand_off: When KV is sent; the paper uses ``on_demand``.
    """

    partial: str = "ppi"
    chunked: str = "cpi"
    max_in_partial: int = Field(default=2, ge=1)
    candidates: int = Field(default=512, ge=1)
    refine: bool = False
    cut_share: float | None = Field(default=None, ge=0, le=1)
    cut_tokens: int | None = Field(default=None, ge=0)
    hand_off: HandOffRule = "on_demand"

    def model_post_init(self, context: object, /) -> None:
        """Refuse two kinds of cuts, and caches that cannot change a cut."""
        if self.cut_share is not None and self.cut_tokens is not None:
            raise JaxinferError("both cut_share and cut_tokens: give one of them")
        if self.by_cache and self.fixed_cut(0) is not None:
            raise JaxinferError("by_cache has no effect on a fixed cut; leave one of them out")

    def fixed_cut(self, prompt_len: int) -> int | None:
        """Return how many tokens of a prompt the options give the PPI; None if they do not say."""
        if self.cut_share is not None:
            return round(self.cut_share * prompt_len)
        return None if self.cut_tokens is None else min(self.cut_tokens, prompt_len)


@dataclass(slots=True)
class PromptCut:
    """How a request's prompt was cut, with expected and measured times in seconds."""

    prompt_len: int
    length: int
    expected_prefill: float
    expected_chunked: float
    prefill: float = 0.0
    chunked: float = 0.0


class Cronus(System):
    """Splits each prompt between the two instances."""

    Options = CronusOptions
    options: CronusOptions

    def __init__(self, options: CronusOptions) -> None:
        super().__init__(options)
        self.needs_fits = options.fixed_cut(0) is None
        self.cuts: dict[str, PromptCut] = {}
        # Further cuts, which are needed for refining until the PPI is done.
        self._in_partial: dict[str, PromptCut] = {}
        self._left_out = 0
        self._refined = Refined() if options.refine else None

    def check(self, instances: Collection[str]) -> None:
        """Check that both instances that the options name exist."""
        options = self.options
        check_roles({"partial": options.partial, "chunked": options.chunked}, instances)

    def routes(self, instances: Collection[str]) -> Collection[tuple[str, str]]:
        """Return the only route, from the PPI to the CPI."""
        return [(self.options.partial, self.options.chunked)]

    def route(self, waiting: Collection[RequestView], cluster: ClusterView) -> Sequence[Assignment]:
        """Cut requests as long as the PPI accepts them; if an instance is lost, use the other."""
        options = self.options
        left = alive((options.partial, options.chunked), cluster)
        if len(left) == 1:
            return whole_on_least_loaded(left, waiting, cluster)
        free = options.max_in_partial - cluster.instances[options.partial].num_requests
        assignments = []
        for request in islice(waiting, max(free, 0)):
            first = Leg(options.partial, self._cut(request, cluster), options.hand_off)
            assignments.append(Assignment(request.id, (first, Leg(options.chunked))))
        return assignments

    def _cut(self, request: RequestView, cluster: ClusterView) -> int:
        fixed = self.options.fixed_cut(request.prompt_len)
        if fixed is not None:
            return fixed
        load = load_of(cluster.instances[self.options.chunked])
        prefill, mixed = self._fits(cluster)
        parts = CachedParts.of(self.options, request, cluster)
        cached = parts.spared(self.options.partial), parts.spared(self.options.chunked)
        tried = self.options.candidates
        length = balance(prefill, mixed, load, request.prompt_len, tried, *cached)
        if len(self.cuts) < REPORTED:
            kept = self.cuts
        else:
            kept = self._in_partial
            self._left_out += 1
            if not self._refined:
                return length
        kept[request.id] = PromptCut(
            request.prompt_len,
            length,
            prefill.seconds(length - min(cached[0], length)),
            chunked_seconds(mixed, load, request.prompt_len, length or cached[1]),
        )
        return length

    def _fits(self, cluster: ClusterView) -> tuple[PrefillFit, MixedFit]:
        weak = cluster.instances[self.options.partial].fit
        strong = cluster.instances[self.options.chunked].fit
        assert weak
        assert strong
        if self._refined:
            return self._refined.prefill or weak.prefill, self._refined.mixed or strong.mixed
        return weak.prefill, strong.mixed

    @property
    def needs_decode_rows(self) -> bool:
        """True if fits are refined during the run, or a subclass defines ``on_step``."""
        return self._refined is not None or type(self).on_step is not Cronus.on_step

    @property
    def hears_decodes(self) -> bool:
        """Same as ``needs_decode_rows``."""
        return self.needs_decode_rows

    def on_step(self, step: StepView, cluster: ClusterView) -> Sequence[Action]:
        """Record how long the two parts of prompts really take."""
        for row in step.rows:
            name = row.request.id
            cut = self.cuts.get(name) or self._in_partial.get(name)
            if cut is None or row.start >= cut.prompt_len:
                continue
            if step.instance == self.options.partial:
                cut.prefill += step.end - step.start
                if self._refined and row.start + row.count == cut.length:
                    self._refined.add_prefill(cut.length, cut.prefill)
                    self._in_partial.pop(name, None)
            else:
                cut.chunked += step.end - step.start
        if self._refined and step.instance == self.options.chunked:
            self._refined.add_mixed(step, cluster.instances[step.instance].max_num_batched_tokens)
        return ()

    def report(self) -> Mapping[str, object]:
        """Return cuts, and expected and measured times; of many requests, only the first ones."""
        cuts = {name: asdict(cut) for name, cut in self.cuts.items()}
        return {"cuts": cuts} | ({"cuts_left_out": self._left_out} if self._left_out else {})
