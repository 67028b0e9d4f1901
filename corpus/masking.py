"""Which tokens of a sample are masked, and what stands in their place: BERT's rule (arXiv:1810.04805 section 3.1).

15 % of a sample's tokens are chosen; of these 80 % become the mask, 10 % another token, 10 % stay as they are, and all
of them are to be told. A pure function of tokens and key: nothing is drawn from a generator that others share. The
key's stream is Philox's (numpy keeps bit generators' streams over versions), not numpy's distributions.
"""

from __future__ import annotations

import numpy as np

from corpus.dataset import IGNORED
from corpus.mask_tokens import MaskTokens

CHOSEN = 0.15
MASKED, REPLACED = 0.8, 0.1  # of the chosen; the rest stay


def masked(tokens: np.ndarray, *, is_text: np.ndarray, masks: MaskTokens, key: int) -> tuple[np.ndarray, np.ndarray]:
    """(inputs [S], labels [S]) of tokens int64 [S]; is_text: bool [S], those that may be chosen.

    Labels are the tokens themselves where they were chosen, IGNORED elsewhere: unshifted.
    """
    places = np.flatnonzero(is_text)
    count = max(1, round(CHOSEN * len(places))) if len(places) else 0
    raw = np.random.Philox(key=key).random_raw(len(places) + 2 * count)
    order, kinds, others = np.split(raw, [len(places), len(places) + count])
    chosen = places[np.argsort(order, kind="stable")[:count]]
    share = (kinds >> np.uint64(11)) * 2.0**-53
    inputs, labels = tokens.copy(), np.full_like(tokens, IGNORED)
    labels[chosen] = tokens[chosen]
    inputs[chosen[share < MASKED]] = masks.mask_id
    another = (share >= MASKED) & (share < MASKED + REPLACED)
    inputs[chosen[another]] = masks.ordinary[others[another] % np.uint64(len(masks.ordinary))]
    return inputs, labels
