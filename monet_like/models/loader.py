"""Builds models from the MODEL argument of the command line, without ``eval``.

``torchvision.models.resnet18(num_classes=10)``: a dotted name, called with literal arguments.
``unet``, ``darts``: this package's own. ``path/to/file.py:make_model``: a function in a file of yours.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from ..errors import UsageError
from ..ir.display import short_repr
from .decoders import SHAPES, decoder
from .nas import amoebanet, darts, nasnet
from .unet import UNet

#: Channels, height, width where nothing else is said.
DEFAULT_INPUT_SHAPE = (3, 224, 224)
_INPUT_SHAPES = {
    "unet": (3, 416, 608),
    "inception_v3": (3, 299, 299),
    **dict.fromkeys(("nasnet", "amoebanet", "darts"), (3, 32, 32)),
}
#: Models that can be named by one word.
_OWN: Mapping[str, Callable[[], nn.Module]] = {
    "unet": UNet,
    "nasnet": nasnet,
    "amoebanet": amoebanet,
    "darts": darts,
    **{name: functools.partial(decoder, name) for name in SHAPES},
}


@dataclass(frozen=True, repr=False)
class ModelSpec:
    """A model built from a MODEL expression.

    Attributes:
        expression: as it was typed.
        name: short, for file names.
        module: the model, in training mode.
        input_shape: without the batch.
        source: the module of the user's file, when MODEL is one; it may define ``make_inputs(batch)``.
    """

    __repr__ = short_repr

    expression: str
    name: str
    module: nn.Module
    input_shape: tuple[int, ...]
    source: ModuleType | None = None


def build_model(expression: str) -> ModelSpec:
    """Build the model that ``expression`` names.

    Raises:
        UsageError: cannot be read, found or called; says what was given and what MODEL may be.
    """
    text = expression.strip()
    source: ModuleType | None = None
    own = text.removesuffix("()")
    if own in _OWN:
        name, made = own, _OWN[own]()
    elif ".py:" in text:
        name, make, source = function_of(text)
        made = _call(make, [], {}, text)
    else:
        name, made = _from_dotted(text)
    if not isinstance(made, nn.Module):
        raise UsageError(f"{expression} gave a {type(made).__name__}, not a torch.nn.Module")
    return ModelSpec(text, name, made.train(), _INPUT_SHAPES.get(name, DEFAULT_INPUT_SHAPE), source)


def is_registered(expression: str) -> bool:
    """Whether ``expression`` names a net of this package or one that torchvision lists, with random weights.

    Building such a one runs no code but theirs and loads nothing, whoever wrote the expression.
    """
    text = expression.strip()
    if text.removesuffix("()") in _OWN:
        return True
    call = _parsed(text)
    names = _dotted(call.func) if isinstance(call, ast.Call) else None
    if names is None or not isinstance(call, ast.Call) or call.args or any(_loads(word.arg) for word in call.keywords):
        return False
    import torchvision

    return (
        names[:2] == ["torchvision", "models"]
        and names[-1] in torchvision.models.list_models()
        and ".".join(names[2:-1]) in ("", "detection", "segmentation", "video")
    )


def _loads(keyword: str | None) -> bool:
    """Whether an argument of torchvision's builders may download something."""
    return keyword is None or "weights" in keyword.replace("init_weights", "") or keyword == "pretrained"


def _from_dotted(text: str) -> tuple[str, Any]:
    node = _parsed(text)
    call = node if isinstance(node, ast.Call) else None
    names = _dotted(call.func if call else node)
    if names is None or len(names) < 2:
        raise UsageError(
            f"MODEL {text!r} is not understood; give a dotted call with literal arguments "
            f'("torchvision.models.resnet18(num_classes=10)"), {", ".join(_OWN)}, or path/to/file.py:make_model'
        )
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    try:
        for arg in call.args if call else ():
            args.append(ast.literal_eval(arg))
        for keyword in call.keywords if call else ():
            if keyword.arg is None:
                raise ValueError("** is not a literal")
            kwargs[keyword.arg] = ast.literal_eval(keyword.value)
    except (ValueError, TypeError):  # a TypeError: an unhashable key
        raise UsageError(
            f"MODEL {text!r} has an argument that is not a literal (number, string, True, None, tuple …)"
        ) from None
    make = _find(names, text)
    if str(getattr(make, "__module__", "")).partition(".")[0] in sys.stdlib_module_names:
        raise UsageError(f"MODEL {text!r} is a function of Python's standard library, not a model")
    return names[-1], _call(make, args, kwargs, text)


def _parsed(text: str) -> ast.expr | None:
    """The expression that a text is; None if it is none."""
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # the last two: nested too deeply
        return None


def _dotted(node: ast.AST | None) -> list[str] | None:
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [*reversed([*names, node.id])] if isinstance(node, ast.Name) else None


def _find(names: list[str], text: str) -> Any:
    found: Any = None
    for count in range(len(names) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(names[:count]))
        except ModuleNotFoundError as error:
            if error.name and error.name.split(".") != names[: error.name.count(".") + 1]:
                raise UsageError(
                    f"importing MODEL {text!r} needs the module {error.name}, which is not installed"
                ) from None
            continue
        except (Exception, SystemExit) as error:  # whatever the user's module raises
            raise UsageError(f"MODEL {text!r} could not be imported: {told(error)}") from error
        break
    if found is None:
        raise UsageError(f"MODEL {text!r}: there is no module {names[0]!r}; is it installed?")
    for position, name in enumerate(names[count:], start=count):
        if not hasattr(found, name):
            import difflib

            near = difflib.get_close_matches(name, dir(found), 3)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise UsageError(f"MODEL {text!r}: {'.'.join(names[:position])} has no {name!r}{hint}")
        found = getattr(found, name)
    return found


def function_of(text: str) -> tuple[str, Callable[..., Any], ModuleType]:
    """The function that ``path/to/file.py:function`` names, with a short name and the file as a module.

    Raises:
        UsageError: there is none, or the file cannot be loaded.
    """
    where, _, function = text.rpartition(":")
    path = Path(where)
    function = function.removesuffix("()")
    if not path.is_file():
        raise UsageError(f"MODEL {text!r}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"monet_like_model_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever the user's file raises
        raise UsageError(f"MODEL {text!r} could not be loaded: {told(error)}") from error
    make = getattr(module, function, None)
    if not callable(make):
        raise UsageError(f"MODEL {text!r}: {path} has no function {function!r}")
    return f"{path.stem}_{function}", make, module


def _call(make: Any, args: list[Any], kwargs: dict[str, Any], text: str) -> Any:
    if not callable(make):
        raise UsageError(f"MODEL {text!r} is a {type(make).__name__} and cannot be called")
    try:
        inspect.signature(make).bind(*args, **kwargs)
    except TypeError as error:
        raise UsageError(f"MODEL {text!r} cannot be called so: {error}") from None
    except ValueError:
        pass  # a builtin without a signature
    try:
        return make(*args, **kwargs)
    except (Exception, SystemExit) as error:  # whatever the model's own code raises
        raise UsageError(f"MODEL {text!r} could not be built: {told(error)}") from error


def told(error: BaseException) -> str:
    """Describe an exception of the user's code in one line: kind, message, place."""
    *_, last = traceback.extract_tb(error.__traceback__)
    place = "" if isinstance(error, SyntaxError) else f" ({last.filename}:{last.lineno})"  # it has its own
    return f"{type(error).__name__}: {error}{place}"
