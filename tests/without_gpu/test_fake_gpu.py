"""The whole path on a fake GPU: what PyTorch's allocator, streams and devices see of it. See `fake_gpu.build`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from fake_gpu import build
from fake_gpu.server import Ask, Server
from rehearsals import REHEARSALS

from benchmarks.decoder_steps import Row
from benchmarks.rows import read_rows
from monet_like.build import library_path
from monet_like.ir.units import GIB, format_bytes
from monet_like.profile.cublas import are_kept, default_bytes, workspace_bytes
from monet_like.replay.graphs.model import MOST_CAPTURES, WARM_UP
from monet_like.replay.graphs.recorder import CudaRecorder
from monet_like.torch_versions import release

ROOT = Path(__file__).resolve().parents[2]

if build.missing():
    pytest.skip(build.missing(), allow_module_level=True)


#: Plain-torch twins take the place of kernels that are not compiled. They look at values, and here nothing has values.
needs_kernels = pytest.mark.skipif(
    not library_path("kernels_cuda").exists(),
    reason="the CUDA kernels are not compiled: python -m monet_like.build --cuda",
)


#: Where nets are so small that cuBLAS's workspaces would by default be more than all else; for cuBLASLt in KiB.
SMALL_WORKSPACES = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "128"}


#: Bytes that cuBLASLt keeps beside cuBLAS, in the thread that calls the model, where both are not one.
OF_CUBLASLT = (0,) if release() > (2, 11) else (0, 2**20)
FAILS_SAFELY = pytest.mark.skipif(not CudaRecorder.fails_safely, reason="no graphs that nobody has asked for")


def assert_predicted(found: dict[str, Any]) -> None:
    """Predictions round tensors up to 512 bytes; the allocator's own figure also has what it does not split off."""
    assert 0.98 * found["predicted"] < found["asked"] <= found["predicted"], found
    assert 0.98 * found["plain predicted"] < found["plain asked"] <= found["plain predicted"], found
    assert found["predicted"] <= 0.8 * found["plain predicted"], found
    assert 0.9 * found["predicted"] < found["allocated"] <= found["predicted"] + found["unsplit"], found


def test_when_memory_ends_it_is_said_what_holds_it(ask: Ask) -> None:
    (found,) = ask("out_of_memory:decoder", **SMALL_WORKSPACES)
    after, inside = found["said"]  # and nothing while operators are measured
    assert after.startswith(
        "out of memory after the backward of Decoder's scheduled step: PyTorch was asked for 1024.00"
    )
    assert f"predicted peak of the step   {format_bytes(found['predicted'])}" in after
    assert "tensors that your loop holds" in after and "the optimizer makes in its first step" in after
    assert 'optimizer="adamw"' in after.splitlines()[-1]
    assert inside.startswith("out of memory in the ") and ", at " in inside.splitlines()[0], inside
    assert inside.splitlines()[1].startswith("  predicted there              "), inside
    assert "of it not in the plan" in inside and "next: " in inside.splitlines()[-1]


def test_when_memory_ends_in_a_block_it_is_said_what_the_step_needs_there(ask: Ask) -> None:
    (found,) = ask("out_of_memory_in_blocks:decoder", **SMALL_WORKSPACES)
    assert len(found["said"]) == 2, found["said"]
    for said, stage, block in zip(found["said"], ("backward", "forward"), found["blocks"], strict=True):
        first, there, peak = said.splitlines()[:3]
        assert first.startswith(f"out of memory in the {stage} of block {block}'s scheduled step"), said
        assert there == f"  predicted there              {format_bytes(found['moments'][f'the {stage} of {block}'])}"
        assert peak.startswith(
            f"  predicted peak of the step   {format_bytes(max(found['moments'].values()))}, budget "
        )


def test_a_card_as_budget_is_what_is_free_less_a_reserve(ask: Ask) -> None:
    (found,) = ask("card:decoder", **SMALL_WORKSPACES)
    unit, reserve = GIB // 4, 4 * GIB  # 5 % of 80 GB
    (whole, again), blocks = found["whole"], found["blocks"]
    assert whole == again  # a plan in the cache is found again, whatever few MB are taken
    for budget, free in ((whole, 77 * GIB), (blocks, 80 * GIB)):
        assert 0 < free - reserve - budget <= unit and budget % unit == 0


@needs_kernels
def test_the_allocator_sees_what_is_predicted(ask: Ask) -> None:
    (found,) = ask("train:unet", **SMALL_WORKSPACES)
    assert_predicted(found)


@pytest.mark.slow
def test_the_allocator_sees_what_is_predicted_of_other_models(ask: Ask) -> None:
    """One process for all; and workspaces are whole units of the allocator."""
    names = ["mobilenet channels_last bfloat16", "vit bfloat16", "decoder", "decoder bfloat16"]
    names += ["resnet18"] * library_path("kernels_cuda").exists()
    what = [*(f"train:{name}" for name in names), "workspaces:mobilenet channels_last bfloat16"]
    *trained, workspaces = ask(*what, **SMALL_WORKSPACES)
    assert len(trained) == len(names)
    for found in trained:
        assert_predicted(found)
    assert workspaces["bytes"] and not workspaces["odd"], workspaces


@needs_kernels
def test_convolutions_in_channels_last_are_planned_where_they_are_faster(ask: Ask) -> None:
    (found,) = ask("in_channels_last:unet bfloat16", **SMALL_WORKSPACES)
    given, faster = found["modes"]
    assert faster == f"{given}_nhwc" and "nhwc" not in given
    assert found["in rows"]
    assert_predicted(found)


@needs_kernels
def test_a_model_offloads_of_its_own_accord_where_that_is_faster(ask: Ask) -> None:
    """Not in a mode that is given, with room for all, or by a slow link. It trains on where nothing can be pinned.

    No more is pinned than predicted, also where the CPU is steps ahead of the GPU.
    """
    (found,) = ask("offloads:decoder", FAKE_GPU_BEHIND="1", **SMALL_WORKSPACES)
    (mode, host_bytes), *others = found["records"]
    assert mode == "inplace_conv_multiway_newnode_offload" and host_bytes > 0
    assert others == [["inplace_conv_multiway_newnode", 0]] * 3
    assert found["again"]
    assert 0 < found["pinned"] <= host_bytes
    assert found["said"] == ["a copy on the host is not in pinned memory, and takes longer: the host is full"]
    assert 0.98 * found["predicted"] < found["asked"] <= found["predicted"] <= 0.6 * found["plain"]


@pytest.mark.parametrize("other", ["cpu", "cuda:1"])
def test_a_model_on_two_devices_is_planned_by_the_memory_of_both(ask: Ask, other: str) -> None:
    """With PyTorch's own operators alone, of which none fails.

    Autograd's thread copies a gradient of the GPU if the schedule's thread still holds it.
    """
    (found,) = ask(f"several_devices:{other}", FAKE_GPU_DEVICES="2", **SMALL_WORKSPACES)
    assert not found["said"]
    on_gpu, on_other = found["asked"]
    assert found["predicted"] <= 0.81 * found["plain"]
    assert 0.8 * found["predicted"] < on_gpu <= found["predicted"] + found["gradients"] < found["plain"], found
    assert bool(on_other) == (other != "cpu")


def assert_graphed(found: dict[str, Any], draws: bool = False) -> None:
    """Of the loss's kernels each is launched, of the schedule's none: inputs, results, incoming gradients and each
    segment's gradients are copied, and a graph that draws is told seed and offset.
    """
    segments, copies = found["segments"], 3 + found["segments"] + 2 * draws
    usual = {"launches": found["steps"][0]["launches"], "graph_launches": 0, "recorded": 0, "forbidden": 0}
    replayed = {"launches": found["loss"] + copies, "graph_launches": segments + 1, "recorded": 0, "forbidden": 0}
    steps = [{name: count for name, count in step.items() if name != "mallocs"} for step in found["steps"]]
    assert steps[:WARM_UP] == [usual] * WARM_UP, found
    recorded = usual["launches"] - found["loss"]  # the same in the rehearsal, which is undone
    assert steps[WARM_UP] == {**replayed, "launches": steps[WARM_UP]["launches"], "recorded": recorded}, found
    assert steps[WARM_UP]["launches"] >= recorded + replayed["launches"]
    assert steps[WARM_UP + 1 :] == [replayed] * 4, found
    assert [step["mallocs"] for step in found["steps"][WARM_UP + 2 :]] == [0] * 3
    assert found["generators equal"]
    (most,) = found["pool"]
    assert 0.7 * found["predicted"] < found["residents"] + most <= found["predicted"], found
    # The first backward of a graph that is retained, and the second of two forwards, run without.
    assert found["retained"]["graph_launches"] == found["pending"]["graph_launches"] == segments + 1
    assert found["retained"]["forbidden"] == found["pending"]["forbidden"] == 0
    assert usual["launches"] < found["pending"]["launches"] < 2 * usual["launches"]


def test_a_step_is_replayed_by_a_graph_for_each_segment(ask: Ask) -> None:
    """After a capture that fails the run goes on without, and PyTorch's generator is as before."""
    found, failed = ask("graphed:decoder", "capture_fails:decoder", **SMALL_WORKSPACES)
    assert_graphed(found)
    assert len(failed["told"]) == 1
    assert "training steps run without CUDA graphs, and compute the same" in failed["told"][0]
    assert [step["graph_launches"] for step in failed["steps"]] == [0] * 5
    assert [step["forbidden"] for step in failed["steps"]] == [0, 0, 1, 0, 0]
    assert {step["launches"] for step in failed["steps"][3:]} == {failed["steps"][0]["launches"]}


def assert_tried(found: dict[str, Any]) -> None:
    """The pool, and all that the step with the trial has, are at most as large as is asked for; of the device is taken
    what is said.
    """
    assert 0.5 * found["predicted"] < found["pool"] <= found["predicted"], found
    assert found["predicted"] < found["all"] <= found["all predicted"], found
    assert found["reserved"] == found["taken"] >= found["pool"]
    count = found["segments"] + 1
    assert [step["graph_launches"] for step in found["steps"]] == [0, 0, 17 * count, count, count], found
    assert [step["forbidden"] for step in found["steps"]] == [0] * 5
    (said,) = found["said"]
    assert said.endswith(f"20.0 ms with them, 40.0 ms without; they hold {format_bytes(found['reserved'])}"), said


@FAILS_SAFELY
def test_graphs_that_nobody_has_asked_for_take_what_is_said(ask: Ask) -> None:
    """Where the plan has no room nothing is tried; where the device has none, what the capture has taken is free."""
    tried, without = ask("graphs_tried:decoder", "graphs_without_memory:decoder", **SMALL_WORKSPACES)
    assert_tried(tried)
    assert without["captures"] == [0, MOST_CAPTURES]  # no more after one that fails
    assert [step["graph_launches"] for step in (*without["usual"], *without["steps"])] == [0] * 10
    first, second, *after, last = (step["launches"] for step in without["steps"])
    assert len({step["launches"] for step in without["usual"]}) == 1
    assert first == second == last < after[0] and after[1:] == [last]  # and one with the trial
    held, after = without["held"]
    assert after <= held
    all_free, beside, half = without["free"]
    assert (all_free - beside, all_free - half) == (GIB, 40 * GIB)
    narrow, failed = without["said"]
    assert "they need" in narrow and "the budget has" in narrow
    assert "OutOfMemoryError: CUDA out of memory" in failed


@FAILS_SAFELY
@pytest.mark.slow
def test_other_graphs_that_nobody_has_asked_for_take_what_is_said(ask: Ask) -> None:
    names = ("vit with dropout", "unet bfloat16", "resnet18")
    for found in ask(*(f"graphs_tried:{name}" for name in names), **SMALL_WORKSPACES):
        assert_tried(found)


@pytest.mark.slow
def test_other_steps_are_replayed_by_graphs(ask: Ask) -> None:
    names = ("vit with dropout", "unet bfloat16", "resnet18")
    for name, found in zip(names, ask(*(f"graphed:{name}" for name in names), **SMALL_WORKSPACES), strict=True):
        assert_graphed(found, draws="dropout" in name)


@pytest.mark.slow
def test_plans_from_a_datasheet_need_what_they_predict(ask: Ask) -> None:
    """Also while a gradient, or an MLP in tiles, is computed by several operators in one task."""
    (found,) = ask("by_rates:large decoder")
    assert any(variant.startswith("tiled_mlp") for variant in found["variants"]), found
    for predicted, asked in zip(found["predicted"], found["asked"], strict=True):
        assert 0.98 * predicted < asked <= predicted, found


@pytest.mark.slow
def test_a_datasheet_knows_what_gradients_of_attention_take(ask: Ask) -> None:
    (found,) = ask("attention:")
    cases = {name: counts for name, counts in found.items() if isinstance(counts, list)}
    assert len(cases) == 12
    for name, (taken, estimated) in cases.items():
        assert taken <= estimated <= 1.02 * taken, (name, taken, estimated)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("resnet18", marks=needs_kernels), "large decoder"])
def test_a_budget_has_room_for_what_cublas_keeps(ask: Ask, name: str) -> None:
    """By default, 32 MiB for each of two threads or for a product: all that is ever allocated was predicted."""
    (found,) = ask(f"whole:{name}")
    assert found["cublas"] - default_bytes(9) in OF_CUBLASLT, found
    assert 0.98 * found["predicted"] < found["asked"] <= found["predicted"], found
    assert 0.98 * found["predicted"] < found["most"] <= found["predicted"] + found["unsplit"], found
    assert found["predicted"] <= 0.8 * found["plain predicted"], found


@needs_kernels
@pytest.mark.slow
def test_a_small_net_in_every_setting(ask: Ask) -> None:
    """One process for all: on two GPUs, with copies on the host, in DistributedDataParallel, and its profile."""
    what = ("live:decoder", "two_devices:unet", "moved:ramp", "offload:unet", "distributed:unet", "workspaces:unet")
    live, moved, ramp, offload, distributed, workspaces = ask(*what, FAKE_GPU_DEVICES="2", **SMALL_WORKSPACES)
    # The first step in its process: autograd's thread has not multiplied yet, and takes cuBLAS's workspace.
    assert 0.98 * live["predicted"] < live["bytes"] <= live["predicted"]
    assert len(set(moved["peaks"])) == 1
    assert moved["peaks"][0] <= moved["predicted"]
    assert moved["plans"] == 1, "moving the model made another plan"
    assert ramp == {"asked for": "moved:ramp", "device": "cuda:0", "plans": 1}
    assert 0 < offload["pinned"] <= offload["pinned predicted"]
    assert offload["asked"] <= offload["predicted"] <= 0.75 * offload["plain"]
    assert distributed["predicted"] == distributed["alone"]
    # Neither the workspace that cuBLAS keeps from its first call on, nor the rest of a block of the allocator.
    found = workspaces["bytes"]
    assert found["relu"] == found["cat"] == found["max_pool2d_with_indices"] == 0, found
    assert 0 < found["convolution"] < 2**24, found


@pytest.mark.slow
@pytest.mark.skipif(not library_path("arena_cuda").exists(), reason="not compiled: python -m monet_like.build --cuda")
def test_tensors_that_are_placed_need_no_more_than_their_block(ask: Ask) -> None:
    (found,) = ask("placed:large vit")
    assert found["counts"] == found["again"]
    assert found["counts"][0] > 100
    assert found["counts"][1] == 0
    assert found["inside"][0] > 10
    assert found["without"] + found["block"] <= 1.01 * found["predicted"]
    rest = found["allocated"] - found["block"]  # in segments of 2 and of 20 MiB, as PyTorch's allocator has them
    assert found["reserved"] <= found["block"] + rest + 30 * 2**20
    assert found["usual"] >= found["reserved"] + 40 * 2**20


@pytest.mark.slow
@pytest.mark.skipif(not library_path("arena_cuda").exists(), reason="not compiled: python -m monet_like.build --cuda")
def test_a_loss_outside_the_model_is_placed_too(ask: Ask) -> None:
    """Autograd's thread runs its backward."""
    (found,) = ask("placed_loss:large vit")
    assert found["counts"][0] > 100
    assert found["counts"][1] == 0
    rest = found["allocated"] - found["block"]
    assert found["reserved"] <= found["block"] + rest + 30 * 2**20


@needs_kernels
@pytest.mark.slow
def test_the_block_that_is_reserved_is_all_that_steps_take(ask: Ask) -> None:
    """Also where cuBLAS has taken its workspaces before."""
    (found,) = ask("reserve:resnet18")
    assert found["wanted"] == found["predicted"] - found["resident"] - found["cublas"], found
    assert found["after"] == found["before"], found


@pytest.mark.slow
def test_inputs_of_a_profile_are_made_on_the_device_where_time_is_taken_behind_a_lead(server: Server) -> None:
    """The stub tells of every launch and event, and of every copy of more than 1 MiB, as of the one at the end."""
    (found, _), said = server.ask("timed:unet", "copies:resnet18", FAKE_GPU_DEVICES="2", FAKE_GPU_TRACE="1")
    lines = said.split("timed")[1].strip().splitlines()
    events = [line.removeprefix("fake_gpu: ") for line in lines if line.startswith("fake_gpu:")]
    assert events == [f"{what} device=1" for what in ("launch", "event", "launch", "launch", "event")]
    assert found["seconds"] == pytest.approx(2.1e-5, abs=1e-6)
    hidden, counted = found["launches"]
    assert hidden < 0.02 <= counted
    _, meanwhile, after = said.split("profiled\n")
    assert "from=pageable to=device" in after
    assert "from=device to=device" in meanwhile
    assert "from=pageable" not in meanwhile
    assert "from=pinned" not in meanwhile


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "90", "100", "110", "120"])
def test_what_cublas_takes(ask: Ask, capability: str) -> None:
    """Two workspaces that are kept, or one of each product, of a size that PyTorch chooses by the GPU's capability."""
    expected = workspace_bytes(int(capability) // 10)
    (found,) = ask("cublas:", FAKE_GPU_CAPABILITY=capability)
    assert found["kept"] - default_bytes(int(capability) // 10) in OF_CUBLASLT
    assert found["of a product"] == (0 if are_kept() else expected)
    if capability == "90":
        (found,) = ask("cublas:", FAKE_GPU_CAPABILITY=capability, **SMALL_WORKSPACES)
        size = 16 * 2**10 * 8
        assert found["of a product"] == (0 if are_kept() else size)
        # cuBLASLt's third one: with PyTorch 2.11.
        assert found["kept"] in ((2 * size, 3 * size) if are_kept() else (0,))
        (found,) = ask("cublas:", FAKE_GPU_CAPABILITY=capability, TORCH_CUBLAS_WORKSPACE_CACHE="1")
        assert found["kept"] - 2 * expected in OF_CUBLASLT and found["of a product"] == 0


@needs_kernels
@pytest.mark.slow
def test_the_gpu_check_runs_to_its_end(ask: Ask, fake_gpu_library: Path, tmp_path: Path) -> None:
    """As where a GPU is lent; with kernels that are there, few tests and one small schedule."""
    found = tmp_path / "solutions" / "small.json"
    ask(f"saved:{found}")
    command = ["bash", str(ROOT / "scripts" / "gpu_check.sh"), str(tmp_path / "out")]
    done = build.run(
        fake_gpu_library, command, PYTHON=sys.executable, BUILD="0", TESTS="tests/gpu/test_reserve.py", STEPS="1",
        SOLUTIONS=str(found.parent), MODELS="resnet18",
    )  # fmt: skip
    assert "tests: passed" in done.stdout
    assert "bandwidth: passed" in done.stdout, (tmp_path / "out" / "bandwidth.log").read_text()
    # Values mean nothing here, so that gradients are wrong is all that may be wrong.
    log = (tmp_path / "out" / "measure.log").read_text().splitlines()
    assert "measure: passed" in done.stdout or log[-1].startswith("wrong gradients: small (gradient of "), log[-5:]
    report = (tmp_path / "out" / "gpu_check.md").read_text()
    assert "cuda: NVIDIA H100 80GB HBM3" in report
    assert "| small | 1024.00 GiB |" in report
    assert len(list((tmp_path / "out" / "profiles").iterdir())) == 1
    assert (tmp_path / "out.tar.gz").exists()


@pytest.mark.slow
def test_the_part_of_weights_on_the_host_runs_to_its_end(fake_gpu_library: Path, tmp_path: Path) -> None:
    command = ["bash", str(ROOT / "scripts" / "gpu_check.sh"), "--part", "5", str(tmp_path / "out")]
    done = build.run(
        fake_gpu_library, command, PYTHON=sys.executable, BUILD="0", STEPS="1", SIZE="tiny", BUDGETS="57 GB"
    )
    assert "decoder: passed" in done.stdout, done.stdout
    rows = {row.contender: row for row in read_rows(tmp_path / "out" / "decoder_steps.csv", Row)}
    assert {row.status for row in rows.values()} == {"measured"}, rows
    ways = [rows[f"checkpoint{way}"].peak_bytes for way in ("", ", swapped", ", CPUOffloadPolicy")]
    assert max(ways[1:]) <= ways[0] < rows["plain"].peak_bytes
    row = rows["streamed for 57 GB"]
    assert 0.99 * row.predicted_bytes < row.peak_bytes <= row.predicted_bytes


#: NumPy cannot read a GPU's memory. PyTorch's trace of it, which its sanitizer of streams turns on, fails in a
#: checkpoint.
ON_A_GPU = [name for name in REHEARSALS if name not in ("shares memory", "checkpoints")]


@pytest.mark.slow
def test_fake_tensors_count_what_real_ones_take(ask: Ask) -> None:
    """In the moments of a step whose blocks are planned."""
    for found in ask(*(f"rehearsals:{name}" for name in ON_A_GPU), **SMALL_WORKSPACES):
        name = found["asked for"].removeprefix("rehearsals:")
        assert found["on fakes"] == REHEARSALS[name].on_fakes
        for fake, real in (found["moments"], found["held"]):
            assert fake and (fake == real or name == "asks"), name  # whose answers nothing has computed


@pytest.mark.slow
def test_streamed_weights_have_no_race_and_faults_are_found(ask: Ask) -> None:
    """By PyTorch's own sanitizer of streams, in forwards, backwards and forwards without gradients."""
    faults = ("none", "no wait", "the first", "the last")
    none, no_wait, first, last = (ask(f"races:{fault}", **SMALL_WORKSPACES)[0] for fault in faults)
    assert none["races"] == 0, none["first"]
    for found in (no_wait, first, last):
        assert found["in training"] > 0, found


@pytest.mark.slow
def test_two_streams_share_streamed_weights_without_a_race(ask: Ask) -> None:
    none, *found = (ask(f"two_streams:{fault}", **SMALL_WORKSPACES)[0] for fault in ("none", "no wait", "forgotten"))
    assert none["races"] == 0, none["first"]
    assert all(each["races"] for each in found), found


@pytest.mark.slow
def test_offloaded_activations_have_no_race_and_faults_are_found(ask: Ask) -> None:
    faults = ("no wait", *(f"{way} {place}" for way in ("out", "back") for place in ("first", "last")))
    none, *found = (ask(f"offloaded:{fault}", **SMALL_WORKSPACES)[0] for fault in ("none", *faults))
    assert none["races"] == 0, none["first"]
    assert all(each["races"] for each in found), [each["races"] for each in found]


@pytest.mark.slow
def test_blocks_that_offload_have_no_race_and_faults_are_found(ask: Ask) -> None:
    """Without a word of the mode; and the allocator sees what is predicted, where the CPU is ahead of the GPU, too.

    The values of a call come back one after the other, so to wait for its last one is to wait for all.
    """
    faults = ("no wait", "out first", "out last", "back last")
    settings = {"FAKE_GPU_BEHIND": "1", **SMALL_WORKSPACES}
    none, *found = (ask(f"offloading_blocks:{fault}", **settings)[0] for fault in ("none", *faults))
    assert none["races"] == 0, none["first"]
    assert all(each["races"] for each in found), [each["races"] for each in found]
    assert sum(map(bool, none["offloaded"])) > 3
    assert none["pinned"] == sum(none["offloaded"])
    assert 0.95 * none["predicted"] <= none["peak"] <= none["predicted"] <= 0.5 * none["plain"]


@pytest.mark.slow
def test_a_plan_that_streams_needs_what_it_predicts(ask: Ask) -> None:
    (found,) = ask("weights:80%", **SMALL_WORKSPACES)
    assert found["streamed"] and found["pinned"] and found["ring"] and found["device"] == "cuda:0"
    assert found["peak"] <= found["predicted"]
    assert found["grown"] == 0


@pytest.mark.slow
def test_distributed_data_parallel_leaves_weights_on_the_host_alone(ask: Ask) -> None:
    """PyTorch refuses a model whose parameters are on two kinds of devices, but for those that are named."""
    (found,) = ask("replicated:14 MB", **SMALL_WORKSPACES)
    assert found["left alone"] == found["on the host"] != []
    assert found["streamed"]


@pytest.mark.slow
def test_the_host_has_room_for_another_dtype_or_nothing_is_changed(ask: Ask) -> None:
    (found,) = ask("no_room:", **SMALL_WORKSPACES)
    assert "are to be kept in pinned memory of the host" in found["said"]
    assert found["are"] == ["torch.float16 cpu"] and found["then"] == ["torch.float16 cuda"]


@pytest.mark.slow(rare=["before"])
@pytest.mark.parametrize("when", ["before", "after", "from float64"])
def test_a_model_that_is_larger_than_the_device_is_never_whole_on_it(ask: Ask, when: str) -> None:
    (found,) = ask(f"larger:14 MB, {when}", **SMALL_WORKSPACES)
    assert found["streamed"] and found["peak"] == pytest.approx(found["predicted"], rel=1e-3)
    assert found["most"] <= 14 * 2**20 < found["own"]
    assert found["trained on"] == ["cuda"]
    places = [device for device, _ in found["afterwards"]]
    assert places == ["cpu" if ahead else "cuda" for _, ahead in found["afterwards"]]  # what fits has moved for good
    assert len(set(places)) == 2
