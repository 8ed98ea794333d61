"""Flight records as values that JSON can hold."""

from __future__ import annotations

import dataclasses
from typing import Any

from mpistrat.record.layout import Phase
from mpistrat.record.read import Entry, Membership, Record


def as_json(record: Record, most_entries: int = 32) -> dict[str, Any]:
    """Return a record with its last entries."""
    entries = record.entries[-most_entries:]
    return {**dataclasses.asdict(dataclasses.replace(record, entries=entries)), "phase": record.phase.name}


def from_json(told: dict[str, Any]) -> Record:
    """Return the record of values that `as_json` made."""
    return Record(
        **{
            **told,
            "phase": Phase[told["phase"]],
            "memberships": tuple(
                Membership(**{**each, "last": Entry(**each["last"]) if each["last"] else None})
                for each in told["memberships"]
            ),
            "steps": tuple(map(tuple, told["steps"])),
            "entries": tuple(Entry(**each) for each in told["entries"]),
        }
    )
