"""Checks whether a hand-off put every entry where it belongs, and if not, names the fault."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxinfer.lab.conformance.compare import Wrong, changed_elsewhere, wrong_blocks
from jaxinfer.lab.conformance.formats import FORMATS
from jaxinfer.lab.conformance.golden import Origin
from jaxinfer.lab.conformance.mover import SLAB_TOKENS
from jaxinfer.lab.conformance.reread import other_readings
from jaxinfer.lab.conformance.rules import RULES, Case, Named, by_rest
from jaxinfer.lab.conformance.side import Side

# Largest number of findings for one request; further ones are consequences of the first.
_MOST = 6


@dataclass(frozen=True)
class Finding:
    """A named fault, and where it shows.

    Attributes:
        name: see the table in docs/proof.md.
        request: the affected request; None for entries outside of all requests handed over.
        blocks: number of blocks of 16 channels that the fault explains.
        text: description of the first of these blocks.
    """

    name: str
    request: int | None
    blocks: int
    text: str

    def __str__(self) -> str:
        return f"{self.name}: {self.text} ({self.blocks} blocks)"


def check(
    source: Side,
    dest: Side,
    requests: Sequence[int],
    *,
    before: Side | None = None,
    freed: Sequence[int] = (),
    cached: Mapping[int, int] | None = None,
    slab_tokens: int = SLAB_TOKENS,
    wire: str | None = None,
    whole_pages: bool = False,
) -> list[Finding]:
    """Check requests that a hand-off has moved; return an empty list if all is well.

    Args:
        dest: destination after the hand-off.
        before: destination before the hand-off, to check that all other entries are unchanged.
        freed: requests whose pages at the destination were given to others before the end.
        cached: by request, the number of its first tokens that the destination had before and that
            the hand-off left out.
        slab_tokens: tokens sent as one slab; used only to name a swap.
        wire: format in which entries are sent, by default the narrower one of the two sides.
        whole_pages: whether a last page may be copied whole, with the source's unused entries.

    Returns:
        The findings: those in the requests' own entries, then those elsewhere, then rounding.
        Within each part, the findings that explain most blocks come first.

    Raises:
        ValueError: there is nothing to check, or a side does not have a request.
    """
    _refuse(source, dest, requests, wire)
    found: list[Finding] = []
    for request in requests:
        wrong = wrong_blocks(source.layout, dest, request, wire)
        base, was = (cached or {}).get(request, 0), None
        if base and before is not None:
            was = wrong.also_in(wrong_blocks(source.layout, before, request, wire))
        found += _explain(Case(wrong, source, dest, slab_tokens, freed, base, was))
    if before is not None:
        found += _elsewhere(before, dest, requests, freed, whole_pages)
    # The entries of an 8-bit page share a scale, so other entries may make rounding coarser.
    return sorted(found, key=lambda f: (f.name == "rounded", f.request is None, -f.blocks))


def _refuse(source: Side, dest: Side, requests: Sequence[int], wire: str | None) -> None:
    if not len(requests):
        raise ValueError("requests is empty: nothing would be checked")
    if wire is not None and wire not in FORMATS:
        raise ValueError(f"wire is {wire!r}, must be one of {', '.join(FORMATS)}")
    for request in requests:
        for end, side in {"source": source, "dest": dest}.items():
            if request not in side.tables:
                known = ", ".join(map(str, side.tables)) or "none"
                raise ValueError(f"request {request!r} is not at the {end}, which has {known}")
        lengths = source.lengths[request], dest.lengths[request]
        if lengths[0] != lengths[1]:
            raise ValueError(
                f"request {request} has {lengths[0]} tokens at the source, {lengths[1]} at the dest"
            )


def _explain(case: Case) -> list[Finding]:
    """Name a request's wrong blocks: repeatedly apply the rule that explains the most."""
    found: list[Finding] = []
    while len(case.wrong) and len(found) < _MOST:
        named: list[Named] = [each for rule in RULES for each in rule(case)]
        named += other_readings(case.dest, case.wrong)
        if not any(mask.any() for _, mask, _ in named):
            named = [each for each in by_rest(case) if each[1].any()]
        name, mask, text = max(named, key=lambda each: int(each[1].sum()))
        found.append(_finding(name, case.wrong.take(mask), text))
        case = case.without(mask)
    return found


def _finding(name: str, wrong: Wrong, text: str) -> Finding:
    parts = "keys", "values"
    origin = wrong.origin
    place = (
        f"request {wrong.request}, layer {wrong.layer[0]}, {parts[wrong.part[0]]}, "
        f"token {wrong.token[0]}, head {wrong.head[0]}"
    )
    said = text.format(
        request=f"request {origin.request[0]}",
        layer=origin.layer[0],
        part=parts[max(0, origin.part[0])],
        token=origin.token[0],
        head=origin.head[0],
        ratio=wrong.ratio[0],
    )
    return Finding(name, wrong.request, len(wrong), f"{place} {said}")


def _elsewhere(
    before: Side, dest: Side, requests: Sequence[int], freed: Sequence[int], whole_pages: bool
) -> list[Finding]:
    """Name entries that were written outside of the requests' pages."""
    counts: dict[str, tuple[int, str]] = {}
    for kind, origin, where in changed_elsewhere(before, dest, requests):
        late = np.isin(origin.request, freed)
        for name, mask in (
            ("late write after free", late),
            ("past the length" if kind == "tail" else "outside its pages", ~late),
        ):
            if mask.any() and not (name == "past the length" and whole_pages):
                count, text = counts.get(name, (0, _where(origin, where, mask)))
                counts[name] = count + int(mask.sum()), text
    return [Finding(name, None, count, text) for name, (count, text) in counts.items()]


def _where(origin: Origin, where: np.ndarray, mask: np.ndarray) -> str:
    (page, offset), request = where[mask][0], origin.request[mask][0]
    whose = f"of request {request}" if request >= 0 else "nobody's"
    return f"page {page} of the destination, offset {offset} holds entries {whose}"
