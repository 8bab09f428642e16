"""Stage marks for a training loop that has none: hooks around model, loss, backward, optimizer and copies.

All hooks are removed when the block ends; the loop itself is not changed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import CodeType
from typing import Any

from flatout.clock import clock
from flatout.errors import ConfigError


@contextmanager
def stages_around(model: Any, optimizer: Any, loss_fn: Any) -> Iterator[None]:
    """Mark forward, loss (if it is a module), backward, optimizer and copies to a GPU inside the block.

    Several models or optimizers (of a GAN, for example) are given as a list or a dict; None: nothing to mark.
    """
    with ExitStack() as stack:
        for each in each_of(model):
            stack.enter_context(_module_stage(_module(each), "forward"))
        if hasattr(loss_fn, "register_forward_pre_hook"):
            stack.enter_context(_module_stage(loss_fn, "loss"))
        stack.enter_context(_backward_stage())
        for each in each_of(optimizer):
            stack.enter_context(_optimizer_stage(each))
        stack.enter_context(_copy_stage())
        yield


def each_of(given: Any) -> Iterable[Any]:
    """A single object as a sequence of one, the items of a list or a dict, nothing for None."""
    if isinstance(given, Mapping):
        return given.values()
    if isinstance(given, list | tuple):
        return given
    return () if given is None else (given,)


def _module(model: Any) -> Any:
    if hasattr(model, "register_forward_pre_hook"):
        return model
    raise ConfigError(
        f"A {type(model).__name__} cannot be watched as a model. Pass the nn.Module that your loop calls (the compiled "
        "or wrapped one, if there is one), a list or dict of modules, or None."
    )


def code_of(loss_fn: Any) -> CodeType | None:
    """The code of a loss that is a plain function: it cannot be hooked, but samples can find it running."""
    return getattr(loss_fn, "__code__", None) or getattr(getattr(loss_fn, "__func__", None), "__code__", None)


class _OpenStages:
    """A stage that is opened and closed by two separate calls. Pairs of calls may nest."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._open: list[Any] = []

    def begin(self, *_: Any) -> None:
        mark = clock.stage(self._name)
        mark.__enter__()
        self._open.append(mark)

    def end(self, *_: Any) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)


@contextmanager
def replaced(owner: Any, methods: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace functions of a class, module or object inside the block; inherited ones are inherited again after it."""
    own = {name: vars(owner)[name] for name in methods if name in vars(owner)}
    for name, method in methods.items():
        setattr(owner, name, method)
    try:
        yield
    finally:
        for name in methods:
            if name in own:
                setattr(owner, name, own[name])
            else:
                delattr(owner, name)


def marked(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with its calls marked as a stage."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with clock.stage(name):
            return work(*args, **kwargs)

    return call


@contextmanager
def _module_stage(module: Any, name: str) -> Iterator[None]:
    bracket = _OpenStages(name)
    # The end is called also when forward raises, or the mark would stay open.
    begin, end = bracket.begin, bracket.end
    with module.register_forward_pre_hook(begin), module.register_forward_hook(end, always_call=True):
        yield


@contextmanager
def _optimizer_stage(optimizer: Any) -> Iterator[None]:
    bracket = _OpenStages("optimizer")
    try:
        handles = [optimizer.register_step_pre_hook(bracket.begin), optimizer.register_step_post_hook(bracket.end)]
    except AttributeError:  # a wrapper: it has no hooks, or inherits them without having initialized them
        handles = []
    with ExitStack() as stack:
        for hooked in handles or [_step_stage(optimizer)]:
            stack.enter_context(hooked)
        yield


@contextmanager
def _step_stage(optimizer: Any) -> Iterator[None]:
    """Mark the `step` method of an object that is not a torch optimizer, but is used like one."""
    step = getattr(optimizer, "step", None)
    if not callable(step):
        raise ConfigError(
            f"A {type(optimizer).__name__} cannot be watched as an optimizer. Pass the object whose step() your loop "
            "calls, a list or dict of them, or None."
        )
    with replaced(optimizer, {"step": marked("optimizer", step)}):
        yield


@contextmanager
def _backward_stage() -> Iterator[None]:
    """Mark autograd's own functions, which `Tensor.backward` calls as well."""
    from torch import autograd

    with replaced(autograd, {name: marked("backward", getattr(autograd, name)) for name in ("backward", "grad")}):
        yield


@contextmanager
def _copy_stage() -> Iterator[None]:
    """Mark copies of host tensors to a GPU; does nothing without one."""
    import torch

    if not torch.cuda.is_available():
        yield
        return

    def watched(original: Callable[..., Any], *, always: bool) -> Callable[..., Any]:
        in_stage = marked("copy", original)

        def copy(self: Any, *args: Any, **kwargs: Any) -> Any:
            is_copy = not self.is_cuda and (always or _names_gpu(args, kwargs))
            return (in_stage if is_copy else original)(self, *args, **kwargs)

        return copy

    to, cuda = watched(torch.Tensor.to, always=False), watched(torch.Tensor.cuda, always=True)
    with replaced(torch.Tensor, {"to": to, "cuda": cuda}):
        yield


def _names_gpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(str(getattr(word, "device", word)).startswith("cuda") for word in (*args, *kwargs.values()))
