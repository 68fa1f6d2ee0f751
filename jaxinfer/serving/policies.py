"""The policies of one instance, found by the names that a run file uses."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import model_validator

from jaxinfer.errors import FAILURES, JaxinferError, raised
from jaxinfer.options.validation import (
    OptionError,
    Options,
    did_you_mean,
    import_own,
    make_with_options,
    shown,
    within,
)
from jaxinfer.serving import admission, batching
from jaxinfer.serving.batch import Batch
from jaxinfer.serving.batch_builder import BatchBuilder
from jaxinfer.serving.instance import Instance
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.views import Leg

ORDERS: Mapping[str, Any] = {
    "fcfs": admission.first_come_first_served,
    "shortest_prompt_first": admission.shortest_prompt_first,
    "longest_prompt_first": admission.longest_prompt_first,
}
ADMISSIONS: Mapping[str, Any] = {
    "greedy": admission.greedy,
    "once_per_prefix": admission.once_per_prefix,
    "whole_request": admission.whole_request,
    "reserve_longest": admission.ReserveLongest,
    "reserve_static": admission.ReserveStatic,
    "reserve_dynamic": admission.ReserveDynamic,
    "peak": admission.Peak,
}
BATCHES: Mapping[str, Any] = {
    "mixed": batching.Mixed,
    "even_decodes": batching.even_decodes,
    "prefill_first": batching.PrefillFirst,
    "whole_prompts": batching.WholePrompts,
    "one_batch": batching.one_batch,
}
VICTIMS: Mapping[str, Any] = {"latest": admission.latest}
KINDS = {"order": ORDERS, "admit": ADMISSIONS, "batching": BATCHES, "victim": VICTIMS}

Policy = str | dict[str, Any]


class PolicyOptions(Options):
    """Policies, each given as a name, as ``name`` with options, or as ``my_module:my_policy``.

    Your own policy is a function, or a class with a class ``Options`` whose instances are called
    like a function. Each instance of the model gets an object of its own.

    Attributes:
        order: Chooses the next waiting request: ``order(waiting) -> request``.
        admit: Tells whether there is room for it: ``admit(instance, request, leg) -> bool``.
        batching: Chooses the work of the next step: ``batching(batch)``, with a ``BatchBuilder``.
        victim: Chooses the request that loses its pages when one more is needed:
            ``victim(candidates) -> request``.
    """

    order: Policy = "fcfs"
    admit: Policy = "greedy"
    batching: Policy = "mixed"
    victim: Policy = "latest"

    @model_validator(mode="before")
    @classmethod
    def _take_old_key(cls, data: Any) -> Any:
        """Accept ``form_batch``, the former name of ``batching``, with a warning."""
        if not isinstance(data, dict) or "form_batch" not in data:
            return data
        if "batching" in data:
            raise OptionError("form_batch: batching is its name now, and is given, too; remove one")
        warnings.warn("policies.form_batch is now policies.batching", FutureWarning, stacklevel=2)
        return {"batching" if key == "form_batch" else key: data[key] for key in data}

    def model_post_init(self, context: object, /) -> None:
        """Refuse unknown policies before anything is loaded."""
        make_policies(self)


@dataclass(frozen=True)
class Policies:
    """The policies of one instance."""

    order: Callable[[Sequence[RequestState]], RequestState] = admission.first_come_first_served
    admit: Callable[[Instance, RequestState, Leg], bool] = admission.greedy
    batching: Callable[[BatchBuilder], None] = batching.mixed
    victim: Callable[[Sequence[RequestState]], RequestState] = admission.latest

    @property
    def repeats_decodes(self) -> bool:
        """See ``InstancePolicies``; all batching policies here do."""
        return self.batching is batching.mixed or (
            self.batching in BATCHES.values() or type(self.batching) in BATCHES.values()
        )

    def next_batch(self, instance: Instance) -> Batch | None:
        """Return the next step, with its rows marked as launched; None if there is none."""
        batch = BatchBuilder(instance)
        self.batching(batch)
        return batch.batch()


def make_policies(options: PolicyOptions) -> Policies:
    """Make the policies of one instance.

    Raises:
        JaxinferError: a name is unknown, or its options are wrong.
    """
    return Policies(**{kind: _make(kind, getattr(options, kind)) for kind in KINDS})


def _make(kind: str, given: Policy) -> Callable[..., Any]:
    options = dict(given) if isinstance(given, dict) else {"name": given}
    name = options.pop("name", None)
    if not isinstance(name, str):
        missing = "is missing" if name is None else f"is {shown(name)}"
        raise OptionError(
            f"{kind}.name {missing}, must be one of {', '.join(KINDS[kind])}, or my_module:policy"
        )
    own = ":" in name
    found = _import(kind, name) if own else KINDS[kind].get(name)
    if found is None:
        raise OptionError(
            f"{kind}: no policy {name!r}: {did_you_mean(name, KINDS[kind])}; or my_module:policy "
            "of your own"
        )
    if not options and hasattr(found, "plain"):
        return found.plain  # Without options, all instances can share one.
    if isinstance(found, type):
        try:
            found = make_with_options(found, options)
        except JaxinferError as error:
            raise within(kind, error) from error.__cause__
    elif options:
        raise OptionError(f"{kind}.{next(iter(options))}: {name} has no options")
    return _Own(kind, name, found) if own else found


def _import(kind: str, name: str) -> Any:
    try:
        found = import_own(name)
    except JaxinferError as error:
        raise OptionError(f"{kind}: {error}") from None
    if not callable(found):
        raise OptionError(f"{kind}: {name!r} is {shown(found)}, must be a function or a class")
    return found


@dataclass(frozen=True)
class _Own:
    """A user's policy; its exceptions and invalid answers become one line that names it."""

    kind: str
    name: str
    policy: Callable[..., Any]

    def __call__(self, *asked: Any) -> Any:
        # The queue belongs to the engine; a policy that removes an item would lose a request.
        shown_to = [_ReadOnly(each) if isinstance(each, Sequence) else each for each in asked]
        try:
            answer = self.policy(*shown_to)
        except JaxinferError:
            raise
        except FAILURES as error:
            raise JaxinferError(
                f"policies.{self.kind}: {self.name} raises {raised(error)}"
            ) from error
        if refusal := _REFUSALS[self.kind](asked[0], answer):
            raise JaxinferError(f"policies.{self.kind}: {self.name} {refusal}")
        return answer


class _ReadOnly(Sequence[RequestState]):
    """A read-only sequence of requests."""

    def __init__(self, requests: Sequence[RequestState]) -> None:
        self._requests = requests

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):  # A deque has no such method.
            return list(self._requests)[index]
        return self._requests[index]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._requests)


def _is_among(given: Sequence[RequestState], answer: Any) -> str | None:
    if any(answer is request for request in given):
        return None
    return f"returns {shown(answer)}, must be one of the requests that it is given"


def _is_yes_or_no(instance: Instance, answer: Any) -> str | None:
    # numpy has its own kind of bool.
    if type(answer).__name__ in ("bool", "bool_"):
        return None
    return f"returns {shown(answer)}, must be True or False"


def _is_a_step(batch: BatchBuilder, answer: Any) -> str | None:
    """Return the error of a launched batch, which ends the run, or None."""
    if answer is not None:
        return f"returns {shown(answer)}, must return nothing: batch.add takes in rows"
    if (most := batch.instance.options.max_num_batched_tokens) < (
        count := batch.grouped + sum(row.count for row in batch.rows)
    ):
        return f"forms a step of {count} tokens, max_num_batched_tokens is {most}"
    for row in batch.rows:
        if row.count < 1 or row.start + row.count > row.request.leg_goal:
            most = row.request.leg_goal - row.start
            return f"takes in {row.count} tokens of {row.request.id!r}, must be 1 to {most}"
    twice = len(batch.rows) - len({row.request.id for row in batch.rows})
    return "takes in a request twice in one step" if twice else None


_REFUSALS: Mapping[str, Callable[[Any, Any], str | None]] = {
    "order": _is_among,
    "admit": _is_yes_or_no,
    "batching": _is_a_step,
    "victim": _is_among,
}
