"""Messages between the loop's process and a worker's; ``kv_messages`` has those about slabs.

Batches, requests and holds are never sent as a whole; only their changes are. Times are those of
``time.perf_counter`` in the worker's process. Processes of one Linux host share this clock; other
hosts count from another moment.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

from jaxinfer.config.cluster import ClusterConfig, LinkConfig
from jaxinfer.models.stage import Layers
from jaxinfer.runtime.kv.sockets import Address
from jaxinfer.runtime.spread.slice_move import Copies
from jaxinfer.runtime.stage.sampler import SamplerShape
from jaxinfer.runtime.stage.stage_plan import AttentionPlan, StageFacts

# Messages to a worker's process, which are handled in this order.


class LoadInstances(NamedTuple):
    """Load these instances on the devices that the process sees. The answer is Loaded.

    Attributes:
        host: address of the process.
        layers: layers of its stages, for instances with stages in other processes.
    """

    model: str
    cluster: ClusterConfig
    host: str
    layers: Mapping[str, Sequence[Layers]]


class FollowOn(NamedTuple):
    """Receive an instance's hidden states from the process at this address. The answer is Left.

    Attributes:
        link: link on which they arrive, if emulated.
    """

    instance: str
    address: Any
    link: LinkConfig | None


class Lend(NamedTuple):
    """Prepare a part of the layers of a stage in another process. The answer is Lent.

    The process allocates the memory of KV heads, or loads the weights of the FFN.

    Attributes:
        plan: plan of the stage.
        number: number of the part, see ``StageFacts.lenders``.
        host: address of the process.
    """

    instance: str
    plan: StageFacts
    number: int
    host: str


class OpenPools(NamedTuple):
    """Compile the work on lent parts, and accept connections. The answer is Left."""


class Borrow(NamedTuple):
    """Use the part of a stage's layers that is computed at this address.

    The answer is Left if ``wait`` is true.
    """

    instance: str
    stage: int
    number: int
    address: Address
    wait: bool = True


class BreakOff(NamedTuple):
    """Stop waiting for processes that lend these pools, in all steps and moves; see ``Forget``."""

    instance: str
    pools: Sequence[tuple[int, int]]


class Forget(NamedTuple):
    """Forget all requests, and continue without some pools. The answer is Forgot.

    Attributes:
        pools: pairs of a stage's number and the number of an attention group in it.
    """

    instance: str
    pools: Sequence[tuple[int, int]]
    number: int


class Prepare(NamedTuple):
    """Compile all that steps with this sampler need. The answer is Left if ``wait`` is true."""

    instance: str
    sampler: SamplerShape
    wait: bool = True


class NewRequest(NamedTuple):
    """Those parts of a request that never change, which are sent once."""

    number: int
    id: str
    prompt_len: int
    max_tokens: int
    prompt_token_ids: Sequence[int]
    payload: object


# Pages of one shard, or by slice if a stage has its slices in several shards.
NewPages = list[int] | dict[int, list[int]]


class Launch(NamedTuple):
    """Start a step. The answer is StepEnded or WorkerFailed.

    Attributes:
        new: requests that the process does not know.
        gone: numbers of requests that have left.
        tokens: output tokens that the process does not know yet, for requests with several unknown
            ones.
        rows: integers of eight bytes: for each row the request, the output token that the process
            does not know yet (-1: none, or several), start, count, samples, input_pending, epoch.
        pages: for each request its number, how many pages it has already, and the new pages of each
            shard.
        halves: the row numbers of each half, if the step is computed as two halves.
    """

    instance: str
    step: int
    origin: float
    new: list[NewRequest]
    gone: list[int]
    tokens: list[tuple[int, list[int]]]
    rows: bytes
    pages: list[tuple[int, int, Sequence[NewPages]]]
    halves: Sequence[Sequence[int]] = ()


class Move(NamedTuple):
    """Copy KV heads between the pools of an instance's stages here. The answer is Moved.

    Attributes:
        move: unique number of the move.
    """

    instance: str
    move: int
    copies: Copies


class Measure(NamedTuple):
    """Call ``measure`` with the process's ``Engine`` of an instance. The answer is CallResult."""

    instance: str
    measure: Callable[[Any], Any]


class EmulateSteps(NamedTuple):
    """Set the emulated duration of a stage's steps."""

    instance: str
    stage: int
    seconds: Any


# Messages from it.


class Heartbeat(NamedTuple):
    """A sign of life, sent each second."""


class Hello(NamedTuple):
    """The versions that the process runs, sent once."""

    jax: str
    jaxinfer: str

    @classmethod
    def here(cls) -> "Hello":
        """Return the versions of this process."""
        return cls(version("jax"), version("jaxinfer"))


class Left(NamedTuple):
    """Progress of a task: the number of parts left, 0 when it is done."""

    what: str
    parts: int


class Loaded(NamedTuple):
    """The plans of each instance's stages, and its worker's ``parts``.

    Attributes:
        addresses: for instances with stages in other processes, the address that sends hidden
            states.
    """

    plans: Mapping[str, Sequence[StageFacts]]
    parts: Mapping[str, list[list[int]]]
    addresses: Mapping[str, Any]


class Forgot(NamedTuple):
    """The Forget with this number is done; all work sent before has ended or failed.

    Attributes:
        why: reason why the Forget failed; None if it succeeded.
    """

    number: int
    why: str | None = None


class Lent(NamedTuple):
    """The plan of the requested part, and the address at which it is available."""

    plan: AttentionPlan | StageFacts
    address: Address


class CallResult(NamedTuple):
    """The result of the function that Measure has sent."""

    found: Any


class Moved(NamedTuple):
    """KV heads have been copied: when the copy began and ended, and the number of bytes."""

    instance: str
    move: int
    start: float
    end: float
    num_bytes: int


class StepEnded(NamedTuple):
    """A step's results.

    Attributes:
        results: arguments of the step's StepDone except the batch.
        overruns: for each stage, the seconds by which emulated steps were late since the last step.
        compiles: for each stage, as ``CompiledStep`` counts: compiles, seconds, late ones.
    """

    instance: str
    step: int
    results: tuple[Any, ...]
    overruns: Sequence[Sequence[float]]
    compiles: Sequence[tuple[int, float, int]]


class WorkerFailed(NamedTuple):
    """An instance has failed; ``is_mistake`` says whether the user made a mistake."""

    instance: str
    is_mistake: bool
    line: str


class Refused(NamedTuple):
    """The process cannot carry out a message, for the reason in ``line``."""

    line: str
