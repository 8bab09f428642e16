"""An order for sets that do not fit into memory: all patches of a few images, then those of the next few.

With room for one group a worker then reads an image once per epoch, where a full shuffle would have it read for nearly
every patch. Within a group patches are shuffled, and images meet other ones in every epoch.
"""

import numpy as np

from flatout.feed.plan import shuffled_order


class GroupedOrder:
    """Order of an epoch, for `Plan(order=...)`."""

    def __init__(self, num_images: int, per_image: int, group: int, seed: int) -> None:
        self._num_images, self._per_image, self._group, self._seed = num_images, per_image, group, seed

    def __call__(self, epoch: int) -> np.ndarray:
        """Sample numbers, int64 [images * patches]: every one exactly once."""
        image_N = shuffled_order(self._num_images, seed=self._seed, epoch=epoch)
        sample_NT = image_N[:, None] * self._per_image + np.arange(self._per_image)
        # Sorted by group first, at random within it: one shuffle of everything says how.
        rank_NT = np.empty(sample_NT.size, np.int64)
        rank_NT[shuffled_order(sample_NT.size, seed=self._seed + 1, epoch=epoch)] = np.arange(sample_NT.size)
        group_NT = np.repeat(np.arange(self._num_images) // self._group, self._per_image)
        return np.asarray(sample_NT.reshape(-1)[np.lexsort((rank_NT, group_NT))])
