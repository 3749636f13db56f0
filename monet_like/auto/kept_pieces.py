"""What earlier plans have found out about a piece of a step, in the cache folder: costs, and schedules of its menu.

A piece is a whole model or a block. Whoever plans an equal program on this device takes them from there: within another
budget, in a deeper model, as a block of one model and the whole of another. So nothing is timed or searched again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from ..compiler.costs import to_profile
from ..compiler.prepared import Prepared
from ..compiler.sources import keep
from ..errors import ScheduleError, ScheduleFileError, warn_caller
from ..files import cache_folder
from ..ir.json_fields import read_with_digest, write_with_digest
from ..ir.profile_file import Profile
from ..ir.program import REFUSED, Cost
from ..ir.schedule import Schedule
from ..ir.simulate import simulate
from ..profile.devices import device_name
from ..profile.settings import settings_digest
from .planning import Settings

FORMAT = "monet_like piece"
VERSION = 1
#: How a menu is searched where that is quick.
QUICK = "quick"


@dataclass(frozen=True)
class KeptPiece:
    """The content of a file.

    Attributes:
        costs: seconds and workspace bytes of tasks, as a quick plan has measured or estimated them; no seconds: it does
            not run here. Costs of full plans are in the device's own store (`monet_like.profile.store`).
        menus: the schedules of menus, by how they were searched (`search_of`).
    """

    costs: Mapping[str, tuple[float | None, int]] = field(default_factory=dict)
    menus: Mapping[str, tuple[Schedule, ...]] = field(default_factory=dict)

    @staticmethod
    def of(piece: str, device: torch.device) -> KeptPiece:
        """What is known of a piece; nothing, with a warning, where the file is damaged.

        Args:
            piece: its digest (`monet_like.auto.kept_plans.digest_of`).
        """
        path = path_of(piece, device)
        if not path.exists():
            return KeptPiece()
        try:
            return KeptPiece.load(path)
        except ScheduleFileError as error:
            warn_caller(f"what is known of a piece is found out anew: {error}")
            return KeptPiece()

    @staticmethod
    def load(path: Path) -> KeptPiece:
        """Read a file; nothing in it can run.

        Raises:
            ScheduleFileError: missing, damaged, of another format or version.
        """
        return read_with_digest(path, KeptPiece, "piece", FORMAT, VERSION)

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all, with what other processes have added to it meanwhile."""
        mine = self
        if path.exists():
            try:
                other = KeptPiece.load(path)
                mine = KeptPiece({**other.costs, **self.costs}, {**other.menus, **self.menus})
            except ScheduleFileError:  # it is replaced
                pass
        write_with_digest(path, {"format": FORMAT, "version": VERSION, **asdict(mine)})

    def profile(self, device: torch.device, known: Profile | None) -> Profile | None:
        """The costs, beside those that the device's store knows; these are better."""
        if not self.costs:
            return known
        costs = {key: REFUSED if cost[0] is None else Cost(cost[0], cost[1]) for key, cost in self.costs.items()}
        mine = to_profile(costs, device, "")
        return mine if known is None else known.merged(mine)

    def menu(self, ready: Prepared, settings: Settings) -> tuple[Schedule, ...] | None:
        """The schedules of a menu that was searched in this way; for a quick plan also of one that took longer."""
        ways = sorted(self.menus, key=lambda way: way == QUICK) if settings.quick else [search_of(settings)]
        for schedules in filter(None, (self.menus.get(way) for way in ways)):
            try:
                for schedule in schedules:
                    simulate(ready.captured.program, schedule, ready.costs)
                return schedules
            except (ScheduleError, IndexError):  # of the program with its gradients in another order
                continue
        return None


def path_of(piece: str, device: torch.device) -> Path:
    """The file of a piece on a device with its present settings and versions."""
    key = VERSION, piece, device_name(device), settings_digest(device)
    return cache_folder() / f"piece_{hashlib.sha256(repr(key).encode()).hexdigest()[:24]}.json"


def search_of(settings: Settings) -> str:
    """How a menu is searched, as a key."""
    if settings.quick:
        return QUICK
    return f"{settings.solver.upper()}, gap {settings.gap}, {settings.time_limit_seconds} s"


def keep_costs(piece: str, device: torch.device, ready: Prepared) -> None:
    """Keep the costs of a quick plan, but for workspaces that are guessed."""
    keys = {task.cost for task in ready.captured.every_task()} & ready.costs.keys() - ready.guessed.keys()
    costs = {key: ready.costs[key] for key in keys}
    written = {key: (None if cost == REFUSED else cost.seconds, cost.workspace_bytes) for key, cost in costs.items()}
    keep(KeptPiece(costs=written), path_of(piece, device))


def keep_menu(piece: str, device: torch.device, schedules: Sequence[Schedule], settings: Settings) -> None:
    """Keep the schedules of a menu."""
    keep(KeptPiece(menus={search_of(settings): tuple(schedules)}), path_of(piece, device))
