"""Paths of the repository that tests read."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
"""Real data for tests and measurements, beside the repository; tests that need it are skipped if it is missing."""
