"""Kernels that Inductor launches on a GPU, counted without one (`fake_gpu.lowered`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fake_gpu import build
from fake_gpu.server import Ask

from monet_like.torch_versions import release

Lowered = Callable[..., list[dict[str, Any]]]

pytestmark = pytest.mark.skipif(bool(build.missing()), reason=build.missing() or "there is a fake GPU")


@pytest.fixture
def lowered(ask: Ask) -> Lowered:
    """Answers of `fake_gpu.lowered.compiled`."""
    return lambda *what: ask(*(f"compiled:{each}" for each in what), CUBLAS_WORKSPACE_CONFIG=":16:8")


@pytest.mark.slow
def test_kernels_of_a_gated_product_by_hand(lowered: Lowered) -> None:
    """Forward: a kernel reads the two products and writes the third one's argument. Backward: a kernel reads both and
    the gradient, and writes two gradients, the first one over what it read.
    """
    tensor = 1024 * 256 * 4
    (found,) = lowered("gated:1.0")
    assert (found["kernels"], found["moved_bytes"]) == (2, (3 + 5) * tensor)
    assert found["calls"] == 3 + 4  # the input wants no gradient: of six products in the backward, it needs four
    assert found["saved_bytes"] == 3 * tensor


#: Of ``torch.compile`` on a decoder layer of Llama 8B's shape, 4,096 tokens: calls, kernels and megabytes that they
#: move, with PyTorch 2.14.
DECODER = {"llama": (30, 17, 2242), "llama with LoRA": (65, 18, 4907)}


@pytest.mark.slow
@pytest.mark.skipif(release() != (2, 14), reason="each version of Inductor fuses a little differently")
def test_kernels_of_a_decoder_layer(lowered: Lowered) -> None:
    counted = lowered(*(f"{name}:1.0" for name in DECODER))
    found = [(c["calls"], c["kernels"], round(c["moved_bytes"] / 1e6)) for c in counted]
    assert found == list(DECODER.values())


#: Values of ``activation_memory_budget``.
SHARES = (1.0, 0.5, 0.2)


#: Layers that are counted seldom.
OTHERS = ["llama", "vit", "bottleneck", "unet", "nnunet"]
SELDOM = ["llama with LoRA-0.5", "gpt2-0.5", "gpt2-0.2", *(f"{name}-{share}" for name in OTHERS for share in SHARES)]


@pytest.mark.slow(rare=SELDOM)
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", ["llama with LoRA", "gpt2", *OTHERS])
def test_a_plan_moves_no_more_than_torch_compile_within_its_peak(lowered: Lowered, name: str, share: float) -> None:
    """At the allocator's peak of ``torch.compile`` under each budget of its own; but for what is faster because fewer
    products run again.
    """
    compiled, planned = lowered(f"{name}:{share}", f"{name}:peak of {share}")
    # PyTorch's allocator does not split off less than 1 MiB of a block; here two blocks at most are too large.
    unsplit = 2 * 2**20 if name in ("vit", "bottleneck") else 0
    assert 0 <= planned["peak_bytes"] - planned["predicted_bytes"] <= unsplit
    assert [planned["kernels"], planned["moved_bytes"]] in planned["judged"][str(planned["share"])]
    assert planned["peak_bytes"] <= planned["budget_bytes"] == compiled["peak_bytes"]
    assert planned["seconds"] <= planned["prices"].get(str(share), planned["seconds"])
    fewer = planned["calls"] < compiled["calls"]
    assert planned["moved_bytes"] <= compiled["moved_bytes"] or fewer
    assert planned["kernels"] <= compiled["kernels"] + 1 or fewer


@pytest.mark.slow
def test_plans_go_on_below_the_least_peak_of_torch_compile(lowered: Lowered) -> None:
    shares = ["0.5", "peak of 0.5", "0.85 of 0.5"]
    _, *found = lowered(*(f"gpt2:{share}" for share in shares))
    assert [planned["seconds"] for planned in found] == sorted(planned["seconds"] for planned in found)
    assert all(planned["peak_bytes"] <= planned["budget_bytes"] for planned in found), found
    assert found[0]["share"] == 0.5 and found[-1]["share"] is None


@pytest.mark.slow
def test_memory_that_fusion_saves_is_planned_with(lowered: Lowered) -> None:
    """What dies within a fused kernel of the decoder layer needs no memory: nothing must run again for it. Where the
    attention runs again, Inductor lays out its result in another way than the graph says, and its backward copies that.
    """
    asked = [f"llama:{what}" for what in ("1.0", "alone of 1.0", "0.95 of 1.0")]
    compiled, planned, tight = lowered(*asked)
    assert planned["moved_bytes"] <= compiled["moved_bytes"] and planned["calls"] == compiled["calls"]
    assert planned["peak_bytes"] == planned["predicted_bytes"] <= planned["budget_bytes"]
    assert tight["calls"] > compiled["calls"] and tight["share"] is None
    assert tight["peak_bytes"] <= tight["predicted_bytes"] <= 1.01 * tight["peak_bytes"]


@pytest.mark.slow
def test_a_second_start_runs_the_same_and_judges_nothing(lowered: Lowered) -> None:
    _, first, second = lowered("gated:1.0", *2 * ["gated:peak of 1.0"])
    assert second.pop("found_by") == "cache" != first.pop("found_by")
    assert first.pop("judged") and not second.pop("judged")
    assert first.pop("prices") and not second.pop("prices")  # of what is judged
    assert second == first


@pytest.mark.slow
def test_the_way_that_is_faster_on_the_device_is_taken_and_timed_once(lowered: Lowered) -> None:
    """Whatever the prices say. It is compiled for that and run, without Triton's kernels, and leaves nothing behind."""
    _, timed, again = lowered("gated:1.0", *2 * ["gated:timed of 1.0"])
    assert len(timed["timed"]) > 1
    assert timed["seconds"] == timed["timed"][-1] == min(timed["timed"])
    assert timed["peak_bytes"] == timed["predicted_bytes"] <= timed["budget_bytes"]
    assert (again["found_by"], again["timed"]) == ("cache", [])
    assert [again[what] for what in ("share", "seconds", "saved_bytes")] == [
        timed[what] for what in ("share", "seconds", "saved_bytes")
    ]


@pytest.mark.slow
def test_copies_for_cuda_graphs_are_within_the_budget(lowered: Lowered) -> None:
    """Of the input and of the incoming gradient. What Inductor writes is read as without graphs."""
    compiled, planned = lowered("gpt2:1.0", "gpt2:graphs of 1.0")
    assert planned["copied_for_graphs"] == 2
    copied = 2 * 8 * 1024 * 768 * 2
    assert planned["predicted_bytes"] + copied <= planned["budget_bytes"] == compiled["peak_bytes"]
    assert planned["predicted_bytes"] < planned["peak_bytes"] <= planned["predicted_bytes"] + copied


@pytest.mark.slow
def test_lost_fusion_is_seen(lowered: Lowered) -> None:
    compiled, planned = lowered("gated:1.0", "gated:unfused of 1.0")
    assert planned["moved_bytes"] > compiled["moved_bytes"] and planned["kernels"] > compiled["kernels"]
    assert planned["predicted_bytes"] == planned["peak_bytes"] == planned["budget_bytes"]


@pytest.mark.slow
def test_a_plan_stands_where_inductor_cannot_write_code_in_advance(lowered: Lowered) -> None:
    compiled, planned, again = lowered("gated:1.0", *2 * ["gated:failing of 1.0"])
    assert again == planned  # it is compared in the next process
    assert planned["judged"] == {} and planned["share"] is None
    assert planned["said"] == [
        "the plan is not compared with torch.compile's own partitions, because Inductor could not write their code: "
        "AssertionError()"
    ]
    assert planned["peak_bytes"] <= planned["predicted_bytes"] <= planned["budget_bytes"] == compiled["peak_bytes"]


@pytest.mark.slow
def test_what_fits_is_taken_where_the_plan_does_not_fit_as_inductor_writes_it(lowered: Lowered) -> None:
    _, planned = lowered("gated:1.0", "gated:swollen of 1.0")
    assert planned["share"] is not None
    assert planned["peak_bytes"] == planned["predicted_bytes"] <= planned["budget_bytes"]


@pytest.mark.slow
def test_a_file_has_the_peak_of_the_schedule_in_it(lowered: Lowered) -> None:
    _, found = lowered("gated:1.0", "gated:file of 1.0")
    assert found["peak_bytes"] == found["needed_bytes"]


@pytest.mark.slow
def test_collectives_are_rehearsed_and_no_partition_stands_beside_their_plans(lowered: Lowered) -> None:
    compiled, planned, tight = lowered(*(f"halved:{what}" for what in ("1.0", "peak of 1.0", "0.9 of 1.0")))
    assert planned["calls"] == compiled["calls"] < tight["calls"]
    for found in (planned, tight):
        assert found["judged"].keys() == {"None"} and not found["said"]
        assert found["peak_bytes"] == found["predicted_bytes"] <= found["budget_bytes"]


@pytest.mark.slow
def test_convolutions_that_inductor_turns_to_channels_last_are_rehearsed_so(lowered: Lowered) -> None:
    """The backward is given what is saved in the layouts that the forward makes, not in those of the graph."""
    compiled, planned = lowered("convolved:1.0", "convolved:peak of 1.0")
    assert planned["judged"]["1.0"] == [[compiled["kernels"], compiled["moved_bytes"]]]
    assert [planned["kernels"], planned["moved_bytes"]] in planned["judged"][str(planned["share"])]


@pytest.mark.slow(rare=["llama with LoRA"])
@pytest.mark.parametrize("name", ["gpt2", "llama with LoRA"])
def test_blocks_launch_what_torch_compile_does_at_its_peak_and_go_on_below(ask: Ask, name: str) -> None:
    """The budget has cuBLAS's workspace besides, which plans of blocks count. Each way is compiled for itself. Where
    values may wait on the host, a step in less memory is shorter than where they may not.
    """
    times = ("1.02", "0.7 normal", "0.7")  # one process answers all, and its peak on the host is that of all so far
    found, here, lean = ask(*(f"blocks:{name}:1.0 in {each}" for each in times), CUBLAS_WORKSPACE_CONFIG=":16:8")
    for one in (found, lean, here):
        assert one["pinned_bytes"] == sum(one["offloaded"])
        assert one["planned"]["peak_bytes"] <= one["predicted_bytes"] <= one["budget_bytes"]
    compiled, planned, ways = found["compiled"], found["planned"], len(found["ways"])
    assert planned["kernels"] <= ways * (compiled["kernels"] + 1)
    assert planned["moved_bytes"] <= ways * compiled["moved_bytes"]
    assert planned["saved_bytes"] == compiled["saved_bytes"] > lean["planned"]["saved_bytes"]
    assert any(lean["offloaded"]) and not any((*found["offloaded"], *here["offloaded"]))
    assert found["seconds"] < lean["seconds"] < here["seconds"]
