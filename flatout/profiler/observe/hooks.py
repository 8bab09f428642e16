"""Stage marks for a training loop that has none: hooks around model, loss, backward, optimizer and copies.

All hooks are removed when the block ends; the loop itself is not changed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
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
        for hooked in _hooks(model, optimizer, loss_fn):
            stack.enter_context(hooked)
        yield


def _hooks(model: Any, optimizer: Any, loss_fn: Any) -> Iterator[AbstractContextManager[Any]]:
    """One hook after the other, so that those before it are removed if one cannot be made."""
    import torch
    from torch import autograd

    for each in each_of(model):
        yield from _module_hooks(_module(each), "forward")
    if hasattr(loss_fn, "register_forward_pre_hook"):
        yield from _module_hooks(loss_fn, "loss")
    # Autograd's own functions, which `Tensor.backward` calls as well.
    yield replaced(autograd, {name: marked("backward", getattr(autograd, name)) for name in ("backward", "grad")})
    for each in each_of(optimizer):
        yield from _optimizer_hooks(each)
    if torch.cuda.is_available():
        to, cuda = _marked_copy(torch.Tensor.to, always=False), _marked_copy(torch.Tensor.cuda, always=True)
        yield replaced(torch.Tensor, {"to": to, "cuda": cuda})


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


def opened(name: str) -> AbstractContextManager[None]:
    """A stage that has begun; whoever asks for it ends it with `__exit__`, in another call."""
    mark = clock.stage(name)
    mark.__enter__()
    return mark


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


def _begin_and_end(name: str) -> tuple[Callable[..., None], Callable[..., None]]:
    """Hooks at the beginning and the end of a stage; pairs of calls may nest."""
    marks: list[AbstractContextManager[None]] = []

    def begin(*_: Any) -> None:
        marks.append(opened(name))

    def end(*_: Any) -> None:
        if marks:
            marks.pop().__exit__(None, None, None)

    return begin, end


def _module_hooks(module: Any, name: str) -> Iterator[AbstractContextManager[Any]]:
    begin, end = _begin_and_end(name)
    yield module.register_forward_pre_hook(begin)
    # The end is called also when forward raises, or the mark would stay open.
    yield module.register_forward_hook(end, always_call=True)


def _optimizer_hooks(optimizer: Any) -> Sequence[AbstractContextManager[Any]]:
    begin, end = _begin_and_end("optimizer")
    try:
        return optimizer.register_step_pre_hook(begin), optimizer.register_step_post_hook(end)
    except AttributeError:  # a wrapper: it has no hooks, or inherits them without having initialized them
        return (_step_hook(optimizer),)


def _step_hook(optimizer: Any) -> AbstractContextManager[None]:
    """Mark the `step` method of an object that is not a torch optimizer, but is used like one."""
    step = getattr(optimizer, "step", None)
    if not callable(step):
        raise ConfigError(
            f"A {type(optimizer).__name__} cannot be watched as an optimizer. Pass the object whose step() your loop "
            "calls, a list or dict of them, or None."
        )
    return replaced(optimizer, {"step": marked("optimizer", step)})


def _marked_copy(original: Callable[..., Any], *, always: bool) -> Callable[..., Any]:
    """A method of tensors, with copies of host tensors to a GPU marked."""
    in_stage = marked("copy", original)

    def copy(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_copy = not self.is_cuda and (always or _names_gpu(args, kwargs))
        return (in_stage if is_copy else original)(self, *args, **kwargs)

    return copy


def _names_gpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(str(getattr(word, "device", word)).startswith("cuda") for word in (*args, *kwargs.values()))
