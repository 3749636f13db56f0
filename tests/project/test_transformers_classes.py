"""A slice of ``python -m benchmarks.transformers_classes``, and its verdicts."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks import transformers_classes
from benchmarks.verdicts import RIGHT, VALUES, WRONG

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
    assert (found.status, found.detail) == (RIGHT, "")


def test_sizes_by_values_are_refused_in_words() -> None:
    found = transformers_classes.compared("jetmoe", "JetMoeForCausalLM")
    assert found.status in (RIGHT, VALUES), found.detail


def test_another_gradient_is_found() -> None:
    own = transformers_classes.AnySchedule.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = own(self, *args, **kwargs)
        result.loss.register_hook(lambda gradient: gradient * torch.tensor(1.0001))
        return result

    with mock.patch.object(transformers_classes.AnySchedule, "forward", forward):
        (found,) = list(transformers_classes.run(0, 1, ("LlamaForCausalLM",)))[:1]
    assert found.status == WRONG
