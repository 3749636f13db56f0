"""Containers among the arguments of a call: lists, dicts and objects that the model may fill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from ..trees import children_of
from .traversal import Walk


def given_containers(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The lists, dicts and objects among arguments that are taken apart, see `trees`, and their paths: the model may
    fill them.
    """
    named = [*((f"positional argument {i}", value) for i, value in enumerate(args)), *_named(kwargs)]
    return [(path, value) for path, value in named if children_of(value) is not None]


def _named(kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(f"argument {name}", value) for name, value in kwargs.items()]


def walk_through(containers: Sequence[tuple[str, Any]], names: Set[str]) -> Walk:
    """Everything behind containers among the arguments that code with these names may read or set."""
    walk = Walk(names, {}, lambda module: None)
    for path, value in containers:
        walk.follow(value, path)
    return walk
