"""Measurements behind the figures in the README and the docs: ``python -m benchmarks.NAME``."""

from pathlib import Path

#: Costs that are committed so that plans can be compared.
PROFILES = Path(__file__).parent / "profiles"
