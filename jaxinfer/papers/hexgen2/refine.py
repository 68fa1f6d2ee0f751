"""Improves plans by small changes (HexGen-2, section 3.4), guided by the flow's bottlenecks."""

import random
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from jaxinfer.papers.hexgen2.capacity import Capacity, GroupRole, signature_of
from jaxinfer.papers.hexgen2.flow import Flow, KVNetwork, PlacedGroup, split
from jaxinfer.papers.hexgen2.gpus import Group
from jaxinfer.papers.hexgen2.moves import KINDS, Change, Kind, MemberPlan, apply, changes

# A rate counts as larger if it exceeds another by this share.
_MORE = 1e-6
# Largest number of changes that a restart makes to the best plan.
_KICKS = 4


@dataclass
class Effort:
    """Limits on a search, which are counts, because results would differ with limits on time.

    Attributes:
        scored: number of plans whose groups' capacities may be added up.
        flows: number of plans whose flow may be computed.
    """

    scored: int
    flows: int

    @property
    def is_left(self) -> bool:
        """True if neither limit is reached."""
        return self.scored > 0 and self.flows > 0


class Scorer:
    """Computes the flows and rates of a limited number of plans.

    Args:
        flow_of: computes a flow, over pairs or shared networks.
        effort: limits for all plans together.
    """

    def __init__(
        self,
        capacity: Capacity,
        network: KVNetwork,
        flow_of: Callable[[Sequence[PlacedGroup], KVNetwork], Flow],
        effort: Effort,
    ) -> None:
        self.capacity, self._network, self._flow_of = capacity, network, flow_of
        self.site, self.effort = capacity.site, effort
        self._placed: dict[tuple[Group, GroupRole], PlacedGroup] = {}

    def placed(self, plan: MemberPlan) -> list[PlacedGroup]:
        """Return the plan's groups, with the rate of each."""
        return [self._place(*member) for member in plan]

    def flow(self, plan: MemberPlan) -> Flow:
        """Return the flow of a plan; the computation counts towards the limit."""
        self.effort.flows -= 1
        return self._flow_of(self.placed(plan), self._network)

    def sides(self, plan: MemberPlan) -> tuple[float, float]:
        """Return the total rate of the groups of each role."""
        groups = self.placed(plan)
        return tuple(sum(groups[i].carried.rate for i in side) for side in split(groups))  # type: ignore[return-value]

    def gain(self, change: Change) -> tuple[float, float]:
        """Return how much more each role can serve after a change."""
        gained = {"prefill": 0.0, "decode": 0.0}
        for members, sign in ((change.out, -1), (change.into, 1)):
            for member in members:
                if member[0]:
                    gained[member[1]] += sign * self._place(*member).carried.rate
        return gained["prefill"], gained["decode"]

    def _place(self, group: Group, role: GroupRole) -> PlacedGroup:
        key = group, role
        if key not in self._placed:
            carried = self.capacity.carried(signature_of(self.site, group), role)
            self._placed[key] = PlacedGroup(group, role, carried)
        return self._placed[key]


@dataclass(frozen=True)
class Scored:
    """A plan, its flow, and the rate of the more plentiful role, which helps past plateaus."""

    plan: MemberPlan
    flow: float
    slack: float

    def beats(self, other: "Scored") -> bool:
        """Tell whether the plan's flow is larger or, if flows are equal, its slack is."""
        if abs(self.flow - other.flow) > _MORE * other.flow:
            return self.flow > other.flow
        return self.slack > other.slack * (1 + _MORE)


def score(scorer: Scorer, plan: MemberPlan) -> Scored:
    """Return a plan's score, which costs one flow computation."""
    return Scored(plan, scorer.flow(plan).total, max(scorer.sides(plan)))


def climb(
    scorer: Scorer, start: Scored, most: int, kinds: Collection[Kind] = KINDS, tries: int = 12
) -> Scored:
    """Apply the first change that improves the plan, until there is none.

    Changes after which the scarcer role can serve the most come first.

    Args:
        most: largest number of GPUs of a group.
        tries: number of changes per round whose flow is computed.
    """
    best = start
    while scorer.effort.is_left:
        better = next(
            (
                each
                for each in islice(_promising(scorer, best, most, kinds), tries)
                if each.beats(best)
            ),
            None,
        )
        if better is None:
            break
        best = better
    return best


def _promising(
    scorer: Scorer, best: Scored, most: int, kinds: Collection[Kind]
) -> Iterable[Scored]:
    prefill, decode = scorer.sides(best.plan)
    ranked = []
    for change in changes(scorer.site, best.plan, kinds, most):
        scorer.effort.scored -= 1
        more, also = scorer.gain(change)
        sides = prefill + more, decode + also
        ranked.append((min(sides), max(sides), change))
    ranked.sort(key=lambda each: each[:2], reverse=True)
    for least, slack, change in ranked:
        if least < best.flow * (1 - _MORE) or not scorer.effort.is_left:
            return
        if least <= best.flow * (1 + _MORE) and slack <= best.slack * (1 + _MORE):
            continue
        plan = apply(best.plan, change)
        yield Scored(plan, scorer.flow(plan).total, slack)


def refine(
    scorer: Scorer, starts: Sequence[MemberPlan], most: int, restarts: int, seed: int
) -> Scored:
    """Return the best plan found from any start, and then from random changes of the best plan."""
    found = [climb(scorer, score(scorer, plan), most) for plan in starts]
    best = max(found, key=lambda each: (each.flow, each.slack))
    rng = random.Random(seed)
    for _ in range(restarts):
        if not scorer.effort.is_left:
            break
        plan = best.plan
        for _ in range(rng.randint(1, _KICKS)):
            options = list(changes(scorer.site, plan, KINDS, most))
            plan = apply(plan, rng.choice(options))
        again = climb(scorer, score(scorer, plan), most)
        if again.beats(best):
            best = again
    return best
