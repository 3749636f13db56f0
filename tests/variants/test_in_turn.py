"""Several tasks as one, their calls one after the other."""

from __future__ import annotations

import torch

from monet_like.capture.captured import TensorMeta, make_task
from monet_like.ir.program import Call, Ref, Task
from monet_like.variants.editor import in_turn

METAS = [TensorMeta.of(torch.empty(2, 2))] * 5


def product(left: int, right: int, writes: int) -> Task:
    """``left @ right.T``: the transposed view has the same name in each of these tasks."""
    turned = Call("aten.t.default", (Ref(right),), (), (Ref("turned"),))
    multiplied = Call("aten.mm.default", (Ref(left), Ref("turned")), (), (Ref(writes),))
    return make_task(f"product_{writes}", (turned, multiplied), (writes,), METAS)


def calls(*tasks: Task) -> list[str]:
    return [call.op.split(".")[1] for call in in_turn(tasks, (), METAS).calls]


def test_a_view_is_made_once() -> None:
    assert calls(product(0, 1, 2), product(3, 1, 4)) == ["t", "mm", "mm"]


def test_a_view_is_made_again_where_its_name_has_become_another() -> None:
    assert calls(product(0, 1, 2), product(1, 0, 3), product(0, 1, 4)) == ["t", "mm", "t", "mm", "t", "mm"]


def test_what_writes_in_place_is_run_as_often_as_it_is_called() -> None:
    added = make_task("added", (Call("aten.add_.Tensor", (Ref(0), Ref(1)), (), ()),), (2,), METAS)
    assert calls(added, added) == ["add_", "add_"]
