"""Better plans by small changes (HexGen-2, section 3.4), guided by what holds the flow back."""

import random
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from jaxinfer.papers.hexgen2.capacity import Capacity, GroupRole, signature_of
from jaxinfer.papers.hexgen2.flow import Flow, KVNetwork, PlacedGroup, split
from jaxinfer.papers.hexgen2.gpus import Group
from jaxinfer.papers.hexgen2.moves import KINDS, Change, Kind, MemberPlan, apply, changes

# A rate is larger than another by this share at least.
_MORE = 1e-6
# What a restart changes of the best plan, at most.
_KICKS = 4


@dataclass
class Effort:
    """Limits on a search, as counts, since seconds would make it another one each time.

    Attributes:
        scored: plans whose groups' capacities are added up; ``flows``: plans whose flow is found.
    """

    scored: int
    flows: int

    @property
    def is_left(self) -> bool:
        """True if there is effort left of both."""
        return self.scored > 0 and self.flows > 0


class Scorer:
    """Flows and rates of plans, whose number is limited.

    Args:
        flow_of: over pairs, or shared networks.
        effort: limits on all of these together.
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
        """The plan's groups, with what each carries."""
        return [self._place(*member) for member in plan]

    def flow(self, plan: MemberPlan) -> Flow:
        """Return the flow of a plan; one less is left."""
        self.effort.flows -= 1
        return self._flow_of(self.placed(plan), self._network)

    def sides(self, plan: MemberPlan) -> tuple[float, float]:
        """Return the rates that all groups of each role carry together."""
        groups = self.placed(plan)
        return tuple(sum(groups[i].carried.rate for i in side) for side in split(groups))  # type: ignore[return-value]

    def gain(self, change: Change) -> tuple[float, float]:
        """Return how much more each role carries after a change."""
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
    """A plan, its flow, and what the role that is not short carries: a way past plateaus."""

    plan: MemberPlan
    flow: float
    slack: float

    def beats(self, other: "Scored") -> bool:
        """True if its flow is larger or, of equal flows, its slack."""
        if abs(self.flow - other.flow) > _MORE * other.flow:
            return self.flow > other.flow
        return self.slack > other.slack * (1 + _MORE)


def score(scorer: Scorer, plan: MemberPlan) -> Scored:
    """A plan's."""
    return Scored(plan, scorer.flow(plan).total, max(scorer.sides(plan)))


def climb(
    scorer: Scorer, start: Scored, most: int, kinds: Collection[Kind] = KINDS, tries: int = 12
) -> Scored:
    """Take the first change that makes it better, until none does.

    Changes after which the role that is short carries most come first: that is what guides.

    Args:
        most: GPUs of a group.
        tries: changes of each round whose flow is looked at.
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
    """The best that is found from any start, and then from random changes of the best."""
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
