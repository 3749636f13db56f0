"""A slice of ``python -m benchmarks.transformers_classes``, and its verdicts."""

from __future__ import annotations

import io
import json
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks import transformers_classes

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("llama", "LlamaForCausalLM"),
        ("bert", "BertForMaskedLM"),
        ("bart", "BartForConditionalGeneration"),
        ("vit", "ViTForImageClassification"),
    ],
)
def test_classes_train_as_plain(kind: str, name: str) -> None:
    found = transformers_classes.compared(kind, name)
    assert (found.verdict, found.reason) == ("equal", "")


def test_sizes_by_values_are_refused_in_words() -> None:
    found = transformers_classes.compared("jetmoe", "JetMoeForCausalLM")
    assert found.verdict in ("equal", "refused")
    assert found.verdict == "equal" or "depends on the values of a tensor" in found.reason


def test_another_gradient_is_found() -> None:
    own = transformers_classes.AnySchedule.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = own(self, *args, **kwargs)
        result.loss.register_hook(lambda gradient: gradient * torch.tensor(1.0001))
        return result

    with mock.patch.object(transformers_classes.AnySchedule, "forward", forward):
        out = io.StringIO()
        (found,) = list(transformers_classes.run(0, 1, ("LlamaForCausalLM",), out))[:1]
    assert found.verdict == "wrong"
    assert json.loads(out.getvalue().splitlines()[0])["verdict"] == "wrong"
