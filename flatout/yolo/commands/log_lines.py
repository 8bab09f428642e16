"""Log lines on the terminal: see flatout.engine.log_lines."""

from flatout.engine.log_lines import show_log

__all__ = ["show_log"]
