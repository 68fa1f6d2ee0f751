"""Names faults by checksums of tokens, for engines that send real entries and their sums."""

import numpy as np


def name_by_sums(
    sent_LT: np.ndarray, found_LT: np.ndarray, page_size: int, first_layer: int = 0, start: int = 0
) -> str:
    """Name a fault by comparing the places where sums were found with those where they were sent.

    Every transfer carries sums at little cost; call this only if they differ. Sums identify layers
    and tokens, but neither heads nor the earlier contents of a page. Returns "" unless the sent
    data has most of the wrong sums.

    Args:
        sent_LT: sums of the keys and values sent, by layer and token.
        found_LT: sums of those found at the destination.
        page_size: page size of the destination.
        first_layer: number of the first of these layers, for messages.
        start: number of the first of these tokens, for messages.
    """
    T = sent_LT.shape[1]
    sums, first = np.unique(sent_LT, return_index=True)
    wrong = np.argwhere(found_LT != sent_LT)
    at = np.searchsorted(sums, found_LT[tuple(wrong.T)]).clip(max=len(sums) - 1)
    known = sums[at] == found_LT[tuple(wrong.T)]
    # Sums of equal tokens are equal, and zeros occur everywhere, so most wrong sums must match.
    if 2 * known.sum() <= len(wrong):
        return ""
    here = wrong[known]
    there = np.stack(np.divmod(first[at[known]], T), axis=-1)
    by_layer, by_token = (there - here).T
    name, example = "misplaced", 0
    if not by_token.any():
        name = "layer shifted"
    elif not by_layer.any() and not (by_token % page_size).any():
        name = "page order"
    elif not by_layer.any():
        shifts, counts = np.unique(by_token, return_counts=True)
        most = shifts[counts.argmax()]
        if 2 * counts.max() > len(by_token):
            name = "page offset off by one" if abs(most) == 1 else "page offset"
            example = int(np.argmax(by_token == most))
    offset = first_layer, start
    (layer, token), (other, place) = here[example] + offset, there[example] + offset
    return f"{name}, layer {layer}, token {token} has the sum of layer {other}, token {place}"
