"""The names that each solver uses: its package, its statuses and, through cvxpy, its time limit, gap, threads and
bound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Meaning = Literal["optimal", "infeasible", "limit"]

#: Statuses of cvxpy and (k...) of HiGHS -> their meaning. With a checked incumbent, "limit" and "optimal" differ only
#: in what is proven. Without one, "optimal" is an error, and "limit" means that there is no incumbent. cvxpy reports
#: ``user_limit`` and the inaccurate statuses with and without an incumbent alike.
MEANING: Mapping[str, Meaning] = {
    "optimal": "optimal",
    "kOptimal": "optimal",
    "infeasible": "infeasible",
    "kInfeasible": "infeasible",
    "infeasible_or_unbounded": "infeasible",
    "kUnboundedOrInfeasible": "infeasible",
    "infeasible_inaccurate": "limit",
    "optimal_inaccurate": "limit",
    "user_limit": "limit",
    "kTimeLimit": "limit",
    "kIterationLimit": "limit",
    "kSolutionLimit": "limit",
    "kInterrupt": "limit",
    "kObjectiveBound": "limit",
    "kObjectiveTarget": "limit",
    "killed": "limit",
}


def _no_bound(stats: Any) -> float | None:
    return None


@dataclass(frozen=True)
class Dialect:
    """How one solver is called through cvxpy.

    Attributes:
        package: the Python package that must be installed.
        options: (wall seconds, relative gap, threads) -> arguments of `cvxpy.Problem.solve`. None for HiGHS and CBC,
            which worker.py calls otherwise: through cvxpy they take no start.
        bound: its ``extra_stats`` -> its bound of the objective; None if it does not report one.
    """

    package: str
    options: Callable[[float, float, int], dict[str, Any]] | None = None
    bound: Callable[[Any], float | None] = _no_bound


DIALECTS: Mapping[str, Dialect] = {
    "HIGHS": Dialect("highspy"),
    "CBC": Dialect("pulp"),
    "GUROBI": Dialect(
        "gurobipy",
        lambda seconds, gap, threads: {"TimeLimit": seconds, "MIPGap": gap, "Threads": threads},
        lambda stats: float(stats.ObjBound),
    ),
    "SCIP": Dialect(
        "pyscipopt",
        lambda seconds, gap, threads: {
            "scip_params": {"limits/time": seconds, "limits/gap": gap, "lp/threads": threads}
        },
        lambda stats: float(stats["model"].getDualbound()),
    ),
    "SCIPY": Dialect(
        "scipy",
        lambda seconds, gap, threads: {"scipy_options": {"time_limit": seconds, "mip_rel_gap": gap}},
        lambda stats: float(stats["mip_dual_bound"]),
    ),
    "GLPK_MI": Dialect("cvxopt", lambda seconds, gap, threads: {"tm_lim": int(seconds * 1000), "mip_gap": gap}),
    "CPLEX": Dialect(
        "cplex",
        lambda seconds, gap, threads: {
            "cplex_params": {"timelimit": seconds, "mip.tolerances.mipgap": gap, "threads": threads}
        },
    ),
    "XPRESS": Dialect(
        "xpress", lambda seconds, gap, threads: {"maxtime": int(seconds) + 1, "miprelstop": gap, "threads": threads}
    ),
    "MOSEK": Dialect(
        "mosek",
        lambda seconds, gap, threads: {
            "mosek_params": {
                "MSK_DPAR_MIO_MAX_TIME": seconds,
                "MSK_DPAR_MIO_TOL_REL_GAP": gap,
                "MSK_IPAR_NUM_THREADS": threads,
            }
        },
    ),
}
