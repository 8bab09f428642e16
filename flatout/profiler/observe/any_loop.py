"""Watch a training that nobody edited: its loop is found by what torch sees of it.

    with flatout.profiler.watch_any() as watched:
        train()                                     # any code that trains in this thread
    print(watched.text())

A step lasts from one update of the weights to the next. It ends where the loop asks a DataLoader for its first batch
after optimizer.step(); in a loop that asks for no batch between two updates, it ends with optimizer.step(). Batches
that are requested without gradients belong to a validation, and so do passes over a loader without any update.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from flatout.clock import clock
from flatout.errors import ConfigError
from flatout.profiler.measurement import WAIT
from flatout.profiler.observe.hooks import marked, opened, replaced, stages_around
from flatout.profiler.observe.network_runs import ForwardCall, detached, network_runs
from flatout.profiler.observe.observation import ALL_PHASES, Observation
from flatout.profiler.observe.recorder import StepRecorder
from flatout.profiler.observe.summary import ProbedWorkers
from flatout.profiler.observe.watch import SampleCounter, for_stream, is_stream, probed, runs_workers
from flatout.profiler.outcome import Profile

START = "feed.start"
"""Stage in which a DataLoader starts worker processes, up to the first batch they make."""


@contextmanager
def watch_any(
    *, num_steps: int | None = None, title: str = "", on_complete: Callable[[Profile], None] = lambda profile: None
) -> Iterator[Profile]:
    """Watch whatever trains in this thread inside the block; the profile is complete when the block has ended.

    With `num_steps`, timing ends after that many steps, and the training goes on unwatched. `on_complete` is called
    with the profile as soon as it is complete.
    """
    if isinstance(clock.recorder(), StepRecorder):
        raise ConfigError("This thread is already being watched. End that watch before another one begins.")
    loop = AnyLoop(num_steps=num_steps, title=title, on_complete=on_complete)
    with loop.watching():
        yield loop.profile


class AnyLoop:
    """The training loop of this thread, as far as it is known: where its steps end, its loaders and its modules."""

    def __init__(self, *, num_steps: int | None, title: str, on_complete: Callable[[Profile], None]) -> None:
        self.workers = ProbedWorkers()
        a_step = "A step is an optimizer.step() of torch in the main thread."
        self._observation = Observation(
            self.workers, num_steps=num_steps, title=title, a_step=a_step, on_end=self._ended
        )
        self.profile = Profile(self._observation)
        self.forwards = Forwards(self)
        self._on_complete = on_complete
        self._boundary: str | None = None  # "request" or "update", once it is known
        self._optimizers: dict[int, Any] = {}  # the first one ends steps
        self._updates, self._total_updates = 0, 0  # since the last boundary, and in all
        self._requests = 0  # for training, since the last update
        self._images: Counter[int] = Counter()  # of this step, per loader or module
        self._counters: dict[int, SampleCounter] = {}
        self._validation: Any = None  # the mark of a running validation
        self._validated: set[int] = set()  # data sets of passes without updates
        self._optimizer_mark: Any = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe everything that torch does in this thread inside the block."""
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
        from torch.utils.data import DataLoader

        from flatout.feed import Loader

        with ExitStack() as stack:
            stack.enter_context(self._observation.observing())
            # A Loader without workers leaves its passes to DataLoader.
            for kind, least_workers in ((Loader, 1), (DataLoader, 0)):
                begin = self._watched_passes(kind.__iter__, least_workers)
                stack.enter_context(replaced(kind, {"__iter__": begin}))
            stack.enter_context(replaced(torch, {"save": marked("checkpoint", torch.save)}))
            stack.enter_context(stages_around(None, None, None))
            stack.enter_context(self.forwards.hooked())
            stack.enter_context(register_optimizer_step_pre_hook(self._update_begins))
            stack.enter_context(register_optimizer_step_post_hook(self._update_ends))
            yield

    def is_here(self) -> bool:
        """Whether the calling thread is the observed one, and the observation is not over."""
        return clock.recorder() is self._observation.recorder

    # Steps

    def _end_step(self) -> None:
        images = max(self._images.values(), default=0) or 1
        self._images.clear()
        self._updates = 0
        clock.step_ended(images)
        self.forwards.step_ended(images, self._observation.steps_observed)
        self._observation.after_step()

    def _ended(self) -> None:
        if self._observation.is_complete:
            calls, images = self.forwards.of_one_step
            self.profile.network_runs = network_runs(calls, images, self._optimizers.values())
            self._on_complete(self.profile)

    # Updates

    def _update_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        # One that is called by another (a wrapper, or step() of a parent class) is part of the same update.
        if self.is_here() and self._optimizer_mark is None:
            self.leave_validation()
            self._optimizer_mark = opened("optimizer")

    def _update_ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self.is_here() or self._optimizer_mark is None:
            return
        self._optimizer_mark.__exit__(None, None, None)
        self._optimizer_mark = None
        self._updates += 1
        self._total_updates += 1
        is_first = id(optimizer) == next(iter(self._optimizers), None)
        if self._boundary == "update" and is_first:
            self._end_step()
        elif self._boundary is None and is_first:
            self._boundary = "request" if self._requests else "update"
            self._begin_steps()
        self._optimizers[id(optimizer)] = optimizer
        self._requests = 0

    def _begin_steps(self) -> None:
        """The loop is found: what happened so far belongs to no step."""
        self._observation.attach_device()
        self._images.clear()
        self._updates = 0
        clock.step_ended(0)

    # Batches

    def _watched_passes(self, begin_pass: Callable[[Any], Any], least_workers: int) -> Callable[[Any], Any]:
        def iterate(loader: Any) -> Any:
            if not self.is_here() or loader.num_workers < least_workers:
                return begin_pass(loader)
            starts_workers = loader.num_workers > 0 and not runs_workers(loader)
            # Only while workers are started, or a fetcher is made: both keep what they find.
            with probed(loader, self.workers), clock.stage(START) if starts_workers else nullcontext():
                batches = begin_pass(loader)
            return _Pass(self, loader, batches, starts_workers=starts_workers)

        return iterate

    def next_batch(self, batches: "_Pass") -> Any:
        """The next batch of a pass, with its wait marked."""
        if not self.is_here():
            return next(batches.inner)
        if self._is_validating(batches):
            self._enter_validation()
            return next(batches.inner)
        self.leave_validation()
        if self._boundary == "request" and self._updates:
            self._end_step()
            if not self.is_here():  # that was the last one
                return next(batches.inner)
        self._requests += 1
        is_first = batches.num_taken == 0
        if is_first:
            batches.updates_before = self._total_updates
            self.workers.pass_begins(batches.loader)
            if is_stream(batches.loader):
                self.profile.reword = for_stream
        with clock.stage(START if is_first and batches.starts_workers else WAIT):
            batch = next(batches.inner)
        batches.num_taken += 1
        if id(batches.loader) not in self._counters:
            self._counters[id(batches.loader)] = SampleCounter.of_loader(batches.loader)
        self._images[id(batches.loader)] += self._counters[id(batches.loader)](batch)
        return batch

    def pass_ended(self, batches: "_Pass") -> None:
        """End a pass, after its last batch or when it is abandoned.

        A data set in whose pass no weights were updated counts as validation from then on.
        """
        if not self.is_here():
            return
        self.leave_validation()
        if batches.num_taken:
            self.workers.pass_ends(batches.loader)
            if self._boundary and batches.updates_before == self._total_updates:
                self._validated.add(id(batches.loader.dataset))

    def _is_validating(self, batches: "_Pass") -> bool:
        import torch

        return not torch.is_grad_enabled() or id(batches.loader.dataset) in self._validated

    @property
    def is_validating(self) -> bool:
        return self._validation is not None

    def _enter_validation(self) -> None:
        if self._validation is None:
            self._validation = opened("validate")

    def leave_validation(self) -> None:
        """The loop trains again; nothing happens if it is not validating."""
        innermost = clock.innermost()
        if innermost is not None and innermost is self._validation:
            innermost.__exit__(None, None, None)
            self._validation = None

    # Modules and checkpoints

    def count_images(self, module: Any, args: tuple[Any, ...]) -> None:
        """Count the samples of a forward call, for loops without a DataLoader."""
        shape: Any = getattr(args[0], "shape", ()) if args else ()
        if self._boundary != "request" and len(shape):
            self._images[id(module)] += int(shape[0])


class _Pass:
    """One pass over a DataLoader; everything but `next` is answered by the loader's own iterator."""

    def __init__(self, loop: AnyLoop, loader: Any, inner: Any, *, starts_workers: bool) -> None:
        self.loop, self.loader, self.inner = loop, loader, inner
        self.starts_workers = starts_workers
        self.num_taken = 0
        self.updates_before = 0
        self._is_over = False

    def __iter__(self) -> "_Pass":
        return self

    def __next__(self) -> Any:
        try:
            return self.loop.next_batch(self)
        except StopIteration:
            self._end()
            raise

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __del__(self) -> None:  # a pass that is left early
        self._end()

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self.loop.pass_ended(self)


class Forwards:
    """Marks the forward calls of a loop's outermost modules.

    At first every module of the process is hooked, to find the outermost ones; once they are known, only these.
    """

    DISCOVERY_STEPS = ALL_PHASES.warm_up

    def __init__(self, loop: AnyLoop) -> None:
        self._loop = loop
        self._depth = 0
        self._modules: dict[int, Any] = {}  # found so far
        self._losses: set[int] = set()
        self._trained: set[int] = set()  # called with gradients
        self._discovery, self._hooks = ExitStack(), ExitStack()  # hooks of all modules, and of those found
        self._marks: list[Any] = []
        self._calls: list[ForwardCall] = []
        self.of_one_step: tuple[list[ForwardCall], int] = [], 0
        """The forward calls with gradients of one step, and the samples of that step."""
        self._keeps_calls = False

    @contextmanager
    def hooked(self) -> Iterator[None]:
        from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

        with self._discovery, self._hooks:
            self._discovery.enter_context(register_module_forward_pre_hook(self._enter_any))
            self._discovery.enter_context(register_module_forward_hook(self._leave_any, always_call=True))
            yield

    def step_ended(self, images: int, steps_before: int) -> None:
        """Called after every step; the calls of the first one after the outermost modules are known are kept."""
        if self._keeps_calls:
            self.of_one_step = self._calls, images
        self._keeps_calls = steps_before + 1 == self.DISCOVERY_STEPS
        if self._keeps_calls:
            self._discovery.close()
            for module in self._modules.values():
                self._hook(module)

    def _hook(self, module: Any) -> None:
        # Functions, not methods: a copy of the module must not copy this object with its hooks.
        enter = module.register_forward_pre_hook(lambda m, args, kw: self._enter(m, args, kw), with_kwargs=True)
        self._hooks.enter_context(enter)
        leave = module.register_forward_hook(lambda m, args, out: self._leave(), always_call=True)
        self._hooks.enter_context(leave)

    # While outermost modules are searched

    def _enter_any(self, module: Any, args: tuple[Any, ...]) -> None:
        if not self._loop.is_here():
            return
        self._depth += 1
        if self._depth == 1 and not _is_in_backward():
            self._enter(module, args, {})

    def _leave_any(self, module: Any, args: tuple[Any, ...], output: Any) -> None:
        if not self._loop.is_here():
            return
        self._depth -= 1
        if self._depth == 0 and self._marks:
            self._leave()
            if _is_loss(module, output):
                self._losses.add(id(module))
            if id(module) in self._losses or next(module.parameters(), None) is not None:
                self._modules[id(module)] = module

    # Marks

    def _enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        import torch

        if not self._loop.is_here():
            return
        stage = "loss" if id(module) in self._losses else "forward"
        if torch.is_grad_enabled():
            self._loop.leave_validation()
            self._trained.add(id(module))
            self._loop.count_images(module, args)
            if self._keeps_calls and stage == "forward":
                self._calls.append(detached(ForwardCall(module, args, kwargs)))
        elif id(module) in self._trained and not self._loop.is_validating:
            # The network is evaluated, in a loop without a DataLoader.
            stage = "validate"
        self._marks.append(opened(stage))

    def _leave(self) -> None:
        if self._marks:
            self._marks.pop().__exit__(None, None, None)


def _is_in_backward() -> bool:
    """Whether a module is called by backward(), as with activation checkpointing."""
    return getattr(clock.innermost(), "name", None) == "backward"


def _is_loss(module: Any, output: Any) -> bool:
    return getattr(output, "shape", None) == () and next(module.parameters(), None) is None
