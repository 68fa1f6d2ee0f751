"""Faults by checksums of tokens, for engines that send real entries and sums of them."""

import numpy as np


def name_by_sums(sent_LT: np.ndarray, found_LT: np.ndarray, page_size: int) -> str:
    """Name a fault by where the sums that were found were among those sent; "" where none was.

    Sums go with every transfer at little cost, and this is asked only where they differ. They tell
    layers and tokens apart, but not heads, and keep nothing of what a page held before.

    Args:
        sent_LT: a sum of each layer's keys and values of each token; ``found_LT``: likewise.
        page_size: of the destination.
    """
    T = sent_LT.shape[1]
    sums, first = np.unique(sent_LT, return_index=True)
    wrong = np.argwhere(found_LT != sent_LT)
    at = np.searchsorted(sums, found_LT[tuple(wrong.T)]).clip(max=len(sums) - 1)
    known = sums[at] == found_LT[tuple(wrong.T)]
    # Sums of equal tokens are equal, and zeros are everywhere: most have to be somebody's.
    if 2 * known.sum() <= len(wrong):
        return ""
    layer, token = np.divmod(first[at[known]], T)
    by_layer, by_token = layer - wrong[known, 0], token - wrong[known, 1]
    where = f"it has the sum of layer {layer[0]}, token {token[0]} of this slab"
    if not by_token.any():
        return f"layer shifted, {where}"
    if by_layer.any():
        return f"misplaced, {where}"
    shifts, counts = np.unique(by_token, return_counts=True)
    most = shifts[counts.argmax()]
    if not (by_token % page_size).any():
        return f"page order, {where}"
    if 2 * counts.max() > len(by_token):
        return f"page offset{' off by one' if abs(most) == 1 else ''}, {where}"
    return f"misplaced, {where}"
