"""Plans, which are groups of GPUs with roles, and small changes to them for a search."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import combinations, product
from typing import Literal, NamedTuple

from jaxinfer.papers.hexgen2.capacity import ROLES, GroupRole, signature_of
from jaxinfer.papers.hexgen2.gpus import Group, Site

Member = tuple[Group, GroupRole]
# Sorted, so that equal plans compare as equal.
MemberPlan = tuple[Member, ...]
Kind = Literal["move", "swap", "flip", "merge", "split", "idle"]
KINDS: tuple[Kind, ...] = ("move", "swap", "flip", "merge", "split", "idle")
# Numbers of GPUs that move at once: tensor parallelism needs them in pairs and fours.
_AT_ONCE = (1, 2, 4)


class Change(NamedTuple):
    """A change to a plan: members that are removed, and members that replace them."""

    out: tuple[Member, ...]
    into: tuple[Member, ...]


def as_plan(members: Iterable[Member]) -> MemberPlan:
    """Return the plan of these members, without empty groups."""
    return tuple(sorted(member for member in members if member[0]))


def apply(plan: MemberPlan, change: Change) -> MemberPlan:
    """Return the plan after a change."""
    left = list(plan)
    for member in change.out:
        left.remove(member)
    return as_plan([*left, *change.into])


def idle_gpus(site: Site, plan: MemberPlan) -> Counter[int]:
    """Return how many GPUs of each node belong to no group."""
    free = Counter(dict(enumerate(site.gpus)))
    for group, _ in plan:
        free.subtract(dict(group))
    return +free


def size(group: Group) -> int:
    """Return the number of GPUs of a group."""
    return sum(count for _, count in group)


def changes(site: Site, plan: MemberPlan, kinds: Collection[Kind], most: int) -> Iterator[Change]:
    """Yield small changes, one of each class; a class turns equal groups into equal groups.

    Args:
        most: largest number of GPUs of a group.
    """
    seen: set[object] = set()

    def key(change: Change) -> object:
        return tuple(
            tuple(sorted((signature_of(site, g), role) for g, role in side)) for side in change
        )

    for change in _all(site, plan, kinds, most):
        if sorted(change.out) != sorted(change.into) and (found := key(change)) not in seen:
            seen.add(found)
            yield change


def _all(site: Site, plan: MemberPlan, kinds: Collection[Kind], most: int) -> Iterator[Change]:
    singles = _alike(site, ((member,) for member in plan))
    for (member,) in singles:
        yield from _of_one(member, kinds)
    if "idle" in kinds:
        yield from _with_idle(site, plan, [member for (member,) in singles], most)
    if {"move", "swap", "merge"} & set(kinds):
        for a, b in _alike(site, combinations(plan, 2)):
            for here, there in ((a, b), (b, a)):
                yield from _of_two(site, here, there, kinds, most)


def _alike(site: Site, many: Iterable[tuple[Member, ...]]) -> list[tuple[Member, ...]]:
    """Return one representative per class: equal in types, counts, roles and shared nodes."""
    found: dict[object, tuple[Member, ...]] = {}
    for members in many:
        first: dict[int, int] = {}
        key = tuple(
            (
                role,
                tuple(
                    (site.type_of[n], first.setdefault(n, len(first)), count) for n, count in group
                ),
            )
            for group, role in members
        )
        found.setdefault(key, members)
    return list(found.values())


def _of_one(member: Member, kinds: Collection[Kind]) -> Iterator[Change]:
    group, role = member
    if "flip" in kinds:
        yield Change((member,), ((group, _other(role)),))
    if "split" in kinds:
        for part in product(*(range(count + 1) for _, count in group)):
            taken = _group({n: c for (n, _), c in zip(group, part, strict=True)})
            left = _less(group, taken)
            if taken and left:
                for roles in product(ROLES, ROLES):
                    yield Change((member,), ((taken, roles[0]), (left, roles[1])))


def _of_two(
    site: Site, a: Member, b: Member, kinds: Collection[Kind], most: int
) -> Iterator[Change]:
    (here, role), (there, other) = a, b
    if "move" in kinds:
        for node, count in here:
            for some in _AT_ONCE:
                if some <= count and size(there) + some <= most:
                    taken = ((node, some),)
                    yield Change((a, b), ((_less(here, taken), role), (_more(there, taken), other)))
    if "swap" in kinds:
        for (u, many), (v, few) in product(here, there):
            if site.type_of[u] == site.type_of[v]:
                continue
            for some in _AT_ONCE:
                if some <= min(many, few):
                    out, into = ((u, some),), ((v, some),)
                    yield Change(
                        (a, b),
                        (
                            (_more(_less(here, out), into), role),
                            (_more(_less(there, into), out), other),
                        ),
                    )
    if "merge" in kinds and size(here) + size(there) <= most:
        yield Change((a, b), ((_more(here, there), role),))


def _with_idle(
    site: Site, plan: MemberPlan, singles: Sequence[Member], most: int
) -> Iterator[Change]:
    """Yield changes with idle GPUs: a GPU becomes idle, or idle ones join or form a group."""
    free = idle_gpus(site, plan)
    for member in singles:
        group, role = member
        for node, _ in group:
            yield Change((member,), ((_less(group, ((node, 1),)), role),))
    for node, count in free.items():
        for some in range(1, min(count, most) + 1):
            for role in ROLES:
                yield Change((), ((((node, some),), role),))
            for member in plan if some in _AT_ONCE else ():
                if size(member[0]) + some <= most:
                    more = _more(member[0], ((node, some),))
                    yield Change((member,), ((more, member[1]),))


def _other(role: GroupRole) -> GroupRole:
    return "decode" if role == "prefill" else "prefill"


def _group(counts: dict[int, int]) -> Group:
    return tuple((node, count) for node, count in sorted(counts.items()) if count)


def _less(group: Group, taken: Group) -> Group:
    counts = dict(group)
    for node, count in taken:
        counts[node] -= count
    return _group(counts)


def _more(group: Group, taken: Group) -> Group:
    counts = dict(group)
    for node, count in taken:
        counts[node] = counts.get(node, 0) + count
    return _group(counts)
