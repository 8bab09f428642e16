"""The feed for any torch map-style dataset, with the face of torch's DataLoader. See docs/loader.md."""

from flatout.feed.loader.join import cat_rows, join_rows
from flatout.feed.loader.loader import Loader

__all__ = ["Loader", "cat_rows", "join_rows"]
