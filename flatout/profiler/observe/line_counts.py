"""How often each line of the user's code runs per step, counted in a few steps that are not timed.

Samples tell how long a line takes, not how often it runs. Both together tell a loop of many short operations, which one
tensor operation could replace, from a line that is slow each time.
"""

import linecache
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from flatout.profiler.observe.recorder import callers_of, is_library_code

WRITING = re.compile(
    r"\.write(lines|row|rows)?\(|\bprint\(|flush\(|fsync|json\.dump|add_(scalar|histogram|image)|\blog(ger|ging)?\.\w+\(|"
    r"wandb\.|mlflow\.|savefig\(|to_csv\(|np\.savetxt|tqdm\.write"
)
"""Matches source lines that write to a file, a log or the terminal."""

_Trace = Callable[[FrameType, str, Any], Any]
_Function = tuple[str, str]
"""File and name of a function."""


class LineCounter:
    """Counts the runs of lines, and remembers what functions do: which others they call, whether they return tensors
    that backward() goes through."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._counts: Counter[tuple[str, int]] = Counter()
        self._in_graph: set[_Function] = set()
        self._lines: dict[_Function, set[int]] = defaultdict(set)
        self._calls: dict[_Function, set[_Function]] = defaultdict(set)
        self._is_user_code: dict[CodeType, bool] = {}

    def runs(self, file: str, line: int) -> float:
        """Runs per step of a line; 0: it did not run, or nothing was counted."""
        return self._counts[file, line] / max(1, self.num_steps)

    def is_in_graph(self, file: str, function: str) -> bool:
        """Whether a function of that name returned a tensor that backward() goes through."""
        return (file, function) in self._in_graph

    def writes(self, file: str, function: str) -> bool:
        """Whether a function of that name, or one that it calls, ran a line that writes to a file, a log or the
        terminal."""
        reached, found = [(file, function)], {(file, function)}
        while reached:
            at = reached.pop()
            if any(WRITING.search(linecache.getline(at[0], line)) for line in self._lines.get(at, ())):
                return True
            reached += self._calls.get(at, set()) - found
            found |= self._calls.get(at, set())
        return False

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the lines of this thread inside the block, also in functions that are running already.

        This slows Python down, so steps inside the block must not be timed. Nothing is counted next to a debugger or a
        coverage tool: there is only one trace function.
        """
        if sys.gettrace() is not None:
            yield
            return
        running = [frame for frame in callers_of(sys._getframe()) if self._is_counted(frame.f_code)]
        sys.settrace(self._on_call)
        for frame in running:
            frame.f_trace = self._on_event
        try:
            yield
        finally:
            sys.settrace(None)
            for frame in running:
                frame.f_trace = None

    def _is_counted(self, code: CodeType) -> bool:
        known = self._is_user_code.get(code)
        if known is None:
            known = self._is_user_code[code] = not is_library_code(code.co_filename)
        return known

    def _on_call(self, frame: FrameType, event: str, arg: Any) -> _Trace | None:
        if not self._is_counted(frame.f_code):
            return None
        caller = frame.f_back
        while caller is not None and not self._is_counted(caller.f_code):
            caller = caller.f_back
        if caller is not None:
            self._calls[_function_of(caller.f_code)].add(_function_of(frame.f_code))
        return self._on_event

    def _on_event(self, frame: FrameType, event: str, arg: Any) -> _Trace:
        code = frame.f_code
        if event == "line":
            self._counts[code.co_filename, frame.f_lineno or 0] += 1
            self._lines[_function_of(code)].add(frame.f_lineno or 0)
        elif event == "return" and _requires_grad(arg):
            self._in_graph.add(_function_of(code))
        return self._on_event


def _function_of(code: CodeType) -> _Function:
    return code.co_filename, code.co_name


def _requires_grad(returned: Any) -> bool:
    parts = returned if isinstance(returned, tuple | list) else (returned,)
    return any(getattr(part, "grad_fn", None) is not None for part in parts[:8])
