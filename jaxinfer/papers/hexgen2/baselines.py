"""Searches for comparison: HexGen-2's guided swaps, random swaps, and a genetic search."""

import random

from jaxinfer.errors import JaxinferError
from jaxinfer.hardware.catalogue import ModelShape
from jaxinfer.papers.hexgen2.full_steps import LengthStats
from jaxinfer.papers.hexgen2.moves import Kind, MemberPlan, apply, changes, size
from jaxinfer.papers.hexgen2.partition import num_replicas, partition
from jaxinfer.papers.hexgen2.refine import Scored, Scorer, climb, score

# The paper's moves: a GPU changes its group (Appendix E), or two swap theirs. Our move: a group
# changes its role.
SWAPS: tuple[Kind, ...] = ("move", "swap", "flip")
# HexGen's public search has merges, splits and swaps; numbers of plans, and of new ones.
GENES: tuple[Kind, ...] = ("merge", "split", "swap", "flip")
_POPULATION, _OFFSPRING = 100, 10
# How many groups more or fewer than memory suggests are tried.
_AROUND = 2


def starts(scorer: Scorer, model: ModelShape, lengths: LengthStats) -> list[MemberPlan]:
    """Return partitions into as many groups as memory suggests, and into more and fewer."""
    site = scorer.site
    middle = num_replicas(site, model, lengths.prompt + lengths.decodes)
    most = sum(site.gpus)
    counts = range(max(middle - _AROUND, 2), min(middle + _AROUND, most) + 1)
    if not counts:
        raise JaxinferError("there is one GPU: two roles need two")
    return [partition(site, count) for count in counts]


def most_gpus(plans: list[MemberPlan], least: int) -> int:
    """Return a limit on the size of groups that all of these plans satisfy."""
    return max(least, *(size(group) for plan in plans for group, _ in plan))


def guided(scorer: Scorer, plans: list[MemberPlan], most: int) -> Scored:
    """Improve each start by swaps that raise what the scarcer role can serve (section 3.4)."""
    found = [climb(scorer, score(scorer, plan), most, SWAPS) for plan in plans]
    return max(found, key=lambda each: (each.flow, each.slack))


def random_swaps(scorer: Scorer, plans: list[MemberPlan], most: int, seed: int) -> Scored:
    """Apply random swaps to the best start; each is kept unless it is worse."""
    rng = random.Random(seed)
    best = max((score(scorer, plan) for plan in plans), key=lambda each: (each.flow, each.slack))
    while scorer.effort.is_left:
        again = _mutant(scorer, best.plan, SWAPS, most, rng)
        if again is None:
            break
        if not best.beats(again):
            best = again
    return best


def genetic(scorer: Scorer, plans: list[MemberPlan], most: int, seed: int) -> Scored:
    """Evolve plans by mutations only; the plans with the largest flows survive."""
    rng = random.Random(seed)
    population = [score(scorer, plan) for plan in plans]
    while scorer.effort.is_left:
        parents = rng.choices(population, k=_OFFSPRING)
        made = [_mutant(scorer, parent.plan, GENES, most, rng) for parent in parents]
        known = {each.plan: each for each in (*population, *(m for m in made if m))}
        population = sorted(known.values(), key=_fitness)[:_POPULATION]
    return min(population, key=_fitness)


def _fitness(each: Scored) -> tuple[float, float, MemberPlan]:
    """Return a key; the fittest plan has the least."""
    return -each.flow, -each.slack, each.plan


def _mutant(
    scorer: Scorer, plan: MemberPlan, kinds: tuple[Kind, ...], most: int, rng: random.Random
) -> Scored | None:
    options = list(changes(scorer.site, plan, kinds, most))
    scorer.effort.scored -= 1
    return score(scorer, apply(plan, rng.choice(options))) if options else None
