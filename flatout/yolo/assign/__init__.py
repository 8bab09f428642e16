"""Who matches whom: candidate cells of targets, and the OTA assignment among them."""

from flatout.yolo.assign.assignment import assign_all, assign_ota, route_all
from flatout.yolo.assign.matches import Anchors, Matches, Search, list_matches

__all__ = ["Anchors", "Matches", "Search", "assign_all", "assign_ota", "list_matches", "route_all"]
