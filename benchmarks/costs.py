"""What a model's operators cost, measured in a process of its own: python -m benchmarks.costs JOB

The process has the memory allocator of those whose steps are timed, and runs just before them. Answers with one line
when the profile is written. Batches that are only tried under a limit are not timed: their seconds are in proportion to
those at the work's own batch, and workspaces are measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from benchmarks.processes import job_and_answers
from benchmarks.work import Job
from monet_like.capture.example_inputs import with_batch
from monet_like.compiler.costs import measured_costs, to_profile
from monet_like.compiler.request import Request, captured_for
from monet_like.ir.defaults import MODE
from monet_like.ir.profile_file import Profile
from monet_like.ir.program import Cost
from monet_like.profile.scaling import matched


def measure(job: Job) -> None:
    """Write ``job.costs_file``."""
    model, example = job.model_and_inputs()
    costs: Mapping[str, Cost] = {}
    own = job.batch in job.size.batches
    note = f"measured at batch {job.batch}"
    for mode in (MODE, "normal") if own else (MODE,):
        request = Request(model, example, mode, profile_batch=job.batch, autocast=job.autocast)
        captured = captured_for(request, example)
        costs, _ = measured_costs(request, captured, job.device, known=costs, timed=own)
        if not own:
            base = replace(job, batch=job.size.batches[0])
            known = Profile.load(base.costs_file).costs
            scale = job.batch / base.batch
            alike = replace(request, made_last=captured.made_last)
            pairs = matched(captured, captured_for(alike, with_batch(example, base.batch)))
            seconds = {mine.cost: scale * known[theirs.cost].seconds for mine, theirs in pairs if theirs.cost in known}
            costs = {key: replace(cost, seconds=seconds[key]) for key, cost in costs.items()}
            note = f"seconds measured at batch {base.batch}, scaled to {job.batch}"
    to_profile(costs, job.device, note).save(job.costs_file)


if __name__ == "__main__":
    job, answers = job_and_answers()
    measure(job)
    print("{}", file=answers)
