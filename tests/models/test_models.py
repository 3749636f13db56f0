"""Models by name: dotted calls with literals, files, and what is refused; and the U-Net."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from monet_like.errors import UsageError, shortened
from monet_like.models import UNet, build_model


def refusal(expression: str) -> str:
    """The message that a MODEL is refused with."""
    with pytest.raises(UsageError) as caught:
        build_model(expression)
    return str(caught.value)


def source(folder: Path, text: str) -> Path:
    """A file with models in it."""
    path = folder / "mine.py"
    path.write_text("import torch\nfrom torch import nn\n" + text)
    return path


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


# Dotted calls -------------------------------------------------------------------------------------------------


def test_a_call_with_literals() -> None:
    spec = build_model(" torchvision.models.resnet18(num_classes=10) ")
    assert (spec.expression, spec.name) == ("torchvision.models.resnet18(num_classes=10)", "resnet18")
    assert spec.module.fc.out_features == 10
    assert spec.module.training
    assert spec.input_shape == (3, 224, 224)
    assert spec.source is None


def test_a_model_is_returned_in_training_mode(tmp_path: Path) -> None:
    path = source(tmp_path, "def make():\n    return nn.Dropout().eval()\n")
    assert build_model(f"{path}:make").module.training


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("torch.nn.Conv2d(3, 4, (1, 5), bias=False)", "Conv2d(3, 4, kernel_size=(1, 5), stride=(1, 1), bias=False)"),
        ("torch.nn.LayerNorm([4, 5], eps=1e-3)", "LayerNorm((4, 5), eps=0.001, elementwise_affine=True"),
        ("torch.nn.Hardtanh(-1.5, +2)", "Hardtanh(min_val=-1.5, max_val=2)"),
        ("torch.nn.BatchNorm2d(4, momentum=None)", "BatchNorm2d(4, eps=1e-05, momentum=None, affine=True, "),
        ("torch.nn.modules.linear.Linear(2, 3)", "Linear(in_features=2, out_features=3, bias=True)"),
        ("torch.nn.Identity", "Identity()"),  # a name without a call
    ],
)
def test_literals_of_all_kinds(call: str, expected: str) -> None:
    assert repr(build_model(call).module).startswith(expected)


def test_input_shapes_of_models_that_have_their_own() -> None:
    spec = build_model("torchvision.models.inception_v3(init_weights=False, aux_logits=False, num_classes=2)")
    assert spec.input_shape == (3, 299, 299)


# Nothing is evaluated -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argument",
    [
        "__import__('os').system('touch {}')",
        "(lambda: open('{}', 'w'))()",
        "*[open('{}', 'w')]",
        "**{{'bias': open('{}', 'w')}}",
        "bias=open('{}', 'w')",
        "torch.pi",
        "{{[]: 1}}",
    ],
)
def test_arguments_are_literals(tmp_path: Path, argument: str) -> None:
    sentinel = tmp_path / "sentinel"
    expression = f"torch.nn.Linear(2, 3, {argument.format(sentinel)})"
    assert refusal(expression) == (
        f"MODEL {expression!r} has an argument that is not a literal (number, string, True, None, tuple …)"
    )
    assert not sentinel.exists()


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "resnet18()",
        "7",
        "__import__('os').system('touch {}')",
        "(lambda: open('{}', 'w'))()",
        "torch.nn.ModuleList()[open('{}', 'w')]",
        "torch.nn.Linear(2, 3).cuda()",
        "torch.nn.Linear(2,",
        "model = torch.nn.Linear(2, 3)",
        "\0",
        "(" * 500 + ")" * 500,
        "a.b(" + "-" * 100_000 + "1)",
    ],
)
def test_expressions_are_names_or_calls(tmp_path: Path, expression: str) -> None:
    sentinel = tmp_path / "sentinel"
    expression = expression.replace("{}", str(sentinel))
    assert refusal(expression) == shortened(
        f"MODEL {expression!r} is not understood; give a dotted call with literal arguments "
        '("torchvision.models.resnet18(num_classes=10)"), unet, nasnet, amoebanet, darts, '
        "llama_1b, llama_3b, llama_8b, llama_70b, or path/to/file.py:make_model"
    )
    assert not sentinel.exists()


# Typos and wrong things ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("torchvision.models.resnet81()", "torchvision.models has no 'resnet81'; did you mean resnet18, "),
        ("torchvision.model.resnet18", "torchvision has no 'model'; did you mean models?"),
        ("torch.nn.qqqqqqqqq()", "torch.nn has no 'qqqqqqqqq'"),
        ("torchvison.models.resnet18()", "there is no module 'torchvison'; is it installed?"),
    ],
)
def test_typos(expression: str, expected: str) -> None:
    assert refusal(expression).startswith(f"MODEL {expression!r}: {expected}")


def test_a_module_that_lacks_a_dependency(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing is what it imports, even where the one name begins with the other."""
    (tmp_path / "monetlacking_models.py").write_text("import monetlacking\n")
    monkeypatch.syspath_prepend(tmp_path)
    expression = "monetlacking_models.make()"
    assert refusal(expression) == (
        f"importing MODEL {expression!r} needs the module monetlacking, which is not installed"
    )


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("torch.pi", "MODEL 'torch.pi' is a float and cannot be called"),
        ("torch.nn.Linear", "MODEL 'torch.nn.Linear' cannot be called so: missing a required argument: 'in_features'"),
        ("torch.nn.Linear(2, 3, size=4)", "cannot be called so: got an unexpected keyword argument 'size'"),
        ("torch.Size()", "torch.Size() gave a Size, not a torch.nn.Module"),
    ],
)
def test_what_is_no_model(expression: str, expected: str) -> None:
    assert expected in refusal(expression)


def test_arguments_that_the_model_refuses() -> None:
    expression = "torchvision.models.resnet18(num_clases=3)"
    reason = "TypeError: ResNet.__init__() got an unexpected keyword argument 'num_clases'"
    assert refusal(expression).startswith(f"MODEL {expression!r} could not be built: {reason}")


# Files --------------------------------------------------------------------------------------------------------


def test_a_file(tmp_path: Path) -> None:
    path = source(
        tmp_path, "def make_model():\n    return nn.Linear(2, 3)\n\n\ndef make_inputs(batch):\n    return batch\n"
    )
    for expression in (f"{path}:make_model", f"{path}:make_model()"):
        spec = build_model(expression)
        assert (spec.expression, spec.name) == (expression, "mine_make_model")
        assert repr(spec.module) == "Linear(in_features=2, out_features=3, bias=True)"
        assert spec.source is not None
        assert spec.source.make_inputs(5) == 5


def test_a_class_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source(tmp_path, "class Net(nn.Module):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    assert type(build_model("mine.py:Net").module).__name__ == "Net"


def test_a_missing_file(tmp_path: Path) -> None:
    expression = f"{tmp_path}/no.py:make_model"
    assert refusal(expression) == f"MODEL {expression!r}: there is no file {tmp_path}/no.py"
    (tmp_path / "folder.py").mkdir()
    expression = f"{tmp_path}/folder.py:make_model"
    assert refusal(expression) == f"MODEL {expression!r}: there is no file {tmp_path}/folder.py"


@pytest.mark.parametrize("function", ["make", "make_model(1)", "", "constant", "__import__('os').system('true')"])
def test_a_missing_function(tmp_path: Path, function: str) -> None:
    path = source(tmp_path, "constant = 3\n\n\ndef make_model():\n    return nn.Linear(2, 3)\n")
    expression = f"{path}:{function}"
    assert refusal(expression) == f"MODEL {expression!r}: {path} has no function {function!r}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def make():\n    return 3\n", "gave a int, not a torch.nn.Module"),
        (
            "def make(width):\n    return nn.Linear(2, width)\n",
            "cannot be called so: missing a required argument: 'width'",
        ),
    ],
)
def test_a_function_that_makes_no_model(tmp_path: Path, text: str, expected: str) -> None:
    message = refusal(f"{source(tmp_path, text)}:make")
    assert expected in message


def test_a_failing_function_is_located(tmp_path: Path) -> None:
    path = source(tmp_path, "def make():\n    return helper()\n\n\ndef helper():\n    return 1 // 0\n")
    assert refusal(f"{path}:make").endswith(f"ZeroDivisionError: integer division or modulo by zero ({path}:8)")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("def make(:\n", "SyntaxError: invalid syntax"), ("import monetlacking\n", "No module named 'monetlacking'")],
)
def test_a_file_that_cannot_be_loaded(tmp_path: Path, text: str, expected: str) -> None:
    path = source(tmp_path, text)
    message = refusal(f"{path}:make")
    assert message.startswith(f"MODEL '{path}:make' could not be loaded: ")
    assert expected in message
    assert re.search(r"mine\.py(:3\)|, line 3\))", message)


# The U-Net ----------------------------------------------------------------------------------------------------


def test_unet_has_the_papers_size() -> None:
    """One channel in, two classes out: the paper's net has 31,030,658 parameters and 23 convolutions."""
    with torch.device("meta"):
        net = UNet(channels=1, classes=2)
        spec = build_model(" unet() ")
    assert parameters(net) == 31_030_658
    assert sum(isinstance(m, nn.Conv2d | nn.ConvTranspose2d) for m in net.modules()) == 23
    assert (type(spec.module), spec.name, spec.input_shape) == (UNet, "unet", (3, 416, 608))
    assert parameters(spec.module) == 31_031_745


@pytest.mark.parametrize(
    ("channels", "classes", "width", "depth", "size"),
    [(3, 1, 4, 4, (32, 48)), (1, 5, 2, 1, (6, 2)), (2, 3, 3, 0, (5, 7)), (3, 1, 64, 4, (416, 608))],
)
def test_unet_keeps_height_and_width(
    channels: int, classes: int, width: int, depth: int, size: tuple[int, int]
) -> None:
    with torch.device("meta"):
        net = UNet(channels, classes, width, depth)
        result = net(torch.empty(2, channels, *size))
    assert result.shape == (2, classes, *size)


def positive_unet() -> UNet:
    """With positive weights every ReLU passes, so everything reaches the result."""
    net = UNet(width=2, depth=2)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.abs_()
    return net


def test_unet_trains_every_parameter() -> None:
    net = positive_unet()
    net(torch.rand(1, 3, 8, 12)).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in net.parameters())


def test_unet_concatenates_equal_levels() -> None:
    """Every level's skip reaches the output: silence one and the result changes."""
    net = positive_unet()
    image = torch.rand(1, 3, 8, 8)
    with torch.no_grad():
        whole = net(image)
        for up in net.up:
            kept = up[0].weight.clone()
            up[0].weight[:, : kept.shape[1] // 2] = 0  # the half that reads the skip
            assert not torch.allclose(net(image), whole)
            up[0].weight.copy_(kept)
        assert torch.equal(net(image), whole)


@pytest.mark.parametrize(
    "text", ["os.system('touch bad')", "torch.os.system('touch bad')", "pathlib.Path('bad').touch()"]
)
def test_the_standard_library_holds_no_models(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError):
        build_model(text)
    assert not list(tmp_path.iterdir())
