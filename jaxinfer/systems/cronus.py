"""Cronus: partially disaggregated prefill (section 4 of the paper).

The partial prefill instance (PPI, on the weak group) computes the first part of each prompt; the
chunked prefill instance (CPI, on the strong group) fetches that KV, computes the rest in chunks
beside its decodes, and decodes. The Balancer cuts each prompt so that both parts take as long.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil

from pydantic import Field

from jaxinfer.errors import JaxinferError
from jaxinfer.serving.step_fit import LeastSquares, MixedFit, PrefillFit
from jaxinfer.serving.system import (
    Action,
    Assignment,
    ClusterView,
    HandOffRule,
    InstanceView,
    Leg,
    RequestView,
    StepView,
    System,
    only_one_left,
)
from jaxinfer.validation import Options, did_you_mean


class CronusOptions(Options):
    """Options of ``Cronus``.

    Attributes:
        partial, chunked: names of the two instances.
        max_in_partial: requests in the PPI at most, so that each is cut by fresh statistics.
        candidates: lengths that the Balancer tries.
        refine: go on fitting the Balancer's coefficients from the steps of the run.
        cut: a fixed share of each prompt for the PPI (a fraction), or a fixed number of tokens, in
            place of the Balancer's.
        hand_off: when the KV goes on; the paper's CPI fetches it on demand.
    """

    partial: str = "ppi"
    chunked: str = "cpi"
    max_in_partial: int = Field(default=2, ge=1)
    candidates: int = Field(default=512, ge=1)
    refine: bool = False
    cut: float | int | None = Field(default=None, ge=0)
    hand_off: HandOffRule = "on_demand"


@dataclass(frozen=True)
class Load:
    """What the Balancer knows of the CPI when it cuts a request."""

    free_pages: int
    page_size: int
    max_num_batched_tokens: int
    num_decodes: int
    decode_context: int


def load_of(instance: InstanceView) -> Load:
    """The CPI's statistics now."""
    decodes = [r.computed for r in instance.running.values() if r.computed >= r.prompt_len]
    return Load(
        instance.num_free_pages,
        instance.page_size,
        instance.max_num_batched_tokens,
        len(decodes),
        sum(decodes),
    )


def chunked_seconds(fit: MixedFit, load: Load, prompt_len: int, length: int) -> float:
    """T_chunked: seconds for the CPI to finish a prompt of which ``length`` tokens are there.

    Eq. 1, with the iteration times of eq. 3 at the context before the first and the last chunk.
    The listing in the paper's appendix has the prompt's length for the first one's context, and
    calls two things n_p; eqs. 1 to 3 are followed here.
    """
    rest = prompt_len - length
    if not rest:
        return 0.0
    chunk = load.max_num_batched_tokens - load.num_decodes
    if chunk < 1:
        return float("inf")
    iterations = ceil(rest / chunk)
    first = fit.seconds(length, load.decode_context)
    last = fit.seconds(length + (iterations - 1) * chunk, load.decode_context)
    return iterations * (first + last) / 2


def balance(
    prefill: PrefillFit, mixed: MixedFit, load: Load, prompt_len: int, candidates: int
) -> int:
    """Algorithm 1: L_p, the tokens of the prompt that the PPI computes."""
    if load.free_pages < ceil(prompt_len / load.page_size):
        return prompt_len

    def gap(length: int) -> float:
        return abs(prefill.seconds(length) - chunked_seconds(mixed, load, prompt_len, length))

    return min((ceil(i * prompt_len / candidates) for i in range(1, candidates + 1)), key=gap)


@dataclass
class Cut:
    """One request's cut: what the Balancer expected, and what came. Times in seconds."""

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
        self.needs_fits = options.cut is None
        self.cuts: dict[str, Cut] = {}
        self._refined = Refined() if options.refine else None

    def check(self, instances: Collection[str]) -> None:
        """Two instances, by the names in the options."""
        for role in ("partial", "chunked"):
            name = getattr(self.options, role)
            if name not in instances:
                raise JaxinferError(f"{role} is {name!r}: {did_you_mean(name, instances)}")
        if self.options.partial == self.options.chunked:
            raise JaxinferError(f"partial and chunked are both {self.options.partial!r}")

    def routes(self, instances: Collection[str]) -> Collection[tuple[str, str]]:
        """From the PPI to the CPI."""
        return [(self.options.partial, self.options.chunked)]

    def route(self, waiting: Collection[RequestView], cluster: ClusterView) -> Sequence[Assignment]:
        """Cut requests while the PPI takes them; with one instance lost, all run on the other."""
        options = self.options
        if left := only_one_left(cluster, options.partial, options.chunked):
            return [Assignment(request.id, (Leg(left),)) for request in waiting]
        free = options.max_in_partial - cluster.instances[options.partial].num_requests
        assignments = []
        for request in list(waiting)[: max(free, 0)]:
            first = Leg(options.partial, self._cut(request, cluster), options.hand_off)
            assignments.append(Assignment(request.id, (first, Leg(options.chunked))))
        return assignments

    def _cut(self, request: RequestView, cluster: ClusterView) -> int:
        fixed = self.options.cut
        if fixed is not None:
            length = fixed if isinstance(fixed, int) else round(fixed * request.prompt_len)
            return min(length, request.prompt_len)
        load = load_of(cluster.instances[self.options.chunked])
        prefill, mixed = self._fits(cluster)
        length = balance(prefill, mixed, load, request.prompt_len, self.options.candidates)
        self.cuts[request.id] = Cut(
            request.prompt_len,
            length,
            prefill.seconds(length),
            chunked_seconds(mixed, load, request.prompt_len, length),
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

    def on_step(self, step: StepView, cluster: ClusterView) -> Sequence[Action]:
        """Note how long the parts take in truth."""
        for row in step.rows:
            cut = self.cuts.get(row.request.id)
            if cut is None or row.start >= cut.prompt_len:
                continue
            if step.instance == self.options.partial:
                cut.prefill += step.end - step.start
                if self._refined and row.start + row.count == cut.length:
                    self._refined.add_prefill(cut.length, cut.prefill)
            else:
                cut.chunked += step.end - step.start
        if self._refined and step.instance == self.options.chunked:
            self._refined.add_mixed(step, cluster.instances[step.instance].max_num_batched_tokens)
        return ()

    def report(self) -> Mapping[str, object]:
        """Each request's cut, expected and true times."""
        return {"cuts": {name: asdict(cut) for name, cut in self.cuts.items()}}


class Refined:
    """Fits of the run's own steps, once they are decided by ``ENOUGH`` of them.

    Attributes:
        prefill, mixed: None before.
    """

    ENOUGH = 16

    def __init__(self) -> None:
        self.prefill: PrefillFit | None = None
        self.mixed: MixedFit | None = None
        self._prefills, self._chunks = LeastSquares(2), LeastSquares(3)

    def add_prefill(self, length: int, seconds: float) -> None:
        """A partial prefill as a whole."""
        self._prefills.add((length, 1), seconds)
        found = self._prefills.solve() if self._prefills.count >= self.ENOUGH else None
        if found and found[0] > 0:
            self.prefill = PrefillFit(*found)

    def add_mixed(self, step: StepView, max_tokens: int) -> None:
        """An iteration of the CPI, if its chunks fill it: eq. 3 has no other."""
        decodes = [row.start for row in step.rows if row.start >= row.request.prompt_len]
        chunks = [row.start for row in step.rows if row.start < row.request.prompt_len]
        if not chunks or sum(row.count for row in step.rows) < max_tokens:
            return
        self._chunks.add((sum(chunks), sum(decodes), 1), step.end - step.start)
        found = self._chunks.solve() if self._chunks.count >= self.ENOUGH else None
        if found:
            self.mixed = MixedFit(*found)
